"""The public names, which change only on purpose.

`public_names.txt` lists them. To change one, run this file as a program, with ``tests``
in ``PYTHONPATH``, and describe the change in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from support.frameworks import is_missing

LIST = Path(__file__).with_name("public_names.txt")
SOURCES = Path(__file__).parents[2] / "src"

PACKAGES = (
    "stretto",
    "stretto.schema",
    "stretto.tune",
    "stretto.burst",
    "stretto.horovod.torch",
    "stretto.horovod.tensorflow",
    "stretto.horovod.tensorflow.keras",
    "stretto.jax",
    "stretto.keras",
    "stretto.convert",
    "stretto.papers",
    "stretto.planners",
    "stretto.testing",
    "stretto.errors",
    "stretto.optim",
    "stretto.compression",
    "stretto.cluster.policies",
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
    "stretto.cluster.views": ("ClusterView", "JobsView", "JobView"),
    "stretto.testing.instances": ("capped_cluster", "small_workload"),
    "stretto.testing.backends": ("CASES", "check_case", "run_case"),
}
"""Public names of modules that have no ``__all__``, by module."""


def public_names() -> list[str]:
    """Every exported name, by package."""
    exported = [
        f"{package}.{name}"
        for package in PACKAGES
        if not is_missing(package)
        for name in importlib.import_module(package).__all__
    ]
    return exported + [
        f"{module}.{name}"
        for module, names in MODULES.items()
        for name in names
        if hasattr(importlib.import_module(module), name)
    ]


def test_public_names_are_those_listed() -> None:
    found = public_names()
    listed = [name for name in LIST.read_text().splitlines() if not is_missing(name)]
    assert sorted(set(listed) - set(found)) == [], (
        "removed without a change of the list"
    )
    assert sorted(set(found) - set(listed)) == [], "added without a change of the list"
    assert listed == found


SHARED = {
    "Compression",  # Horovod's name, for tensors of PyTorch and of TensorFlow
    "DistributedDataParallel",  # the public one derives from the runtime's
    "Kind",  # of a conversion's notes, and of requests of the negotiated engine
}
"""Public names that other classes have too."""


def test_the_name_of_a_public_class_is_no_other_class_s():
    """So a search for the name finds one class."""
    public = {
        name.rpartition(".")[2]
        for name in LIST.read_text().split()
        if name.rpartition(".")[2][0].isupper()
    }
    places: dict[str, list[str]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in public - SHARED:
                places.setdefault(node.name, []).append(file.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")
