"""The public names, which change only on purpose.

`public_names.txt` lists them. To change one, run this file as a program, and describe
the change in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
from pathlib import Path

LIST = Path(__file__).with_name("public_names.txt")

PACKAGES = (
    "stretto",
    "stretto.schema",
    "stretto.tune",
    "stretto.burst",
    "stretto.horovod.torch",
    "stretto.convert",
    "stretto.papers",
    "stretto.planners",
    "stretto.testing",
    "stretto.errors",
)


MODULES = {
    "stretto.runtime.backends": ("get", "names", "register"),
    "stretto.runtime.backends.base": (
        "AbstractBackend",
        "AbstractLanes",
        "Lane",
        "LaneFailure",
    ),
    "stretto.runtime.backends.host_work": ("HostThreads",),
    "stretto.runtime.ranks": ("Ranks",),
    "stretto.runtime.store": ("missing_after",),
    "stretto.testing.backends": ("CASES", "check_case", "run_case"),
}
"""What a backend of one's own needs, by module: these modules have no ``__all__``."""


def public_names() -> list[str]:
    """Every exported name, by package."""
    exported = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
    ]
    return exported + [
        f"{module}.{name}"
        for module, names in MODULES.items()
        for name in names
        if hasattr(importlib.import_module(module), name)
    ]


def test_public_names_are_those_listed() -> None:
    listed, found = LIST.read_text().splitlines(), public_names()
    assert sorted(set(listed) - set(found)) == [], (
        "removed without a change of the list"
    )
    assert sorted(set(found) - set(listed)) == [], "added without a change of the list"
    assert listed == found


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")
