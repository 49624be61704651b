"""Packages of other frameworks' programs, and what each needs to be imported."""

from __future__ import annotations

import importlib.util

NEEDS = {
    "stretto.horovod.keras": "tensorflow",
    "stretto.horovod.keras3": "keras",
    "stretto.horovod.tensorflow": "tensorflow",
    "stretto.jax": "jax",
    "stretto.keras": "keras",
}


def is_missing(name: str) -> bool:
    """Whether a module, or a name in it, is of a package that can't be imported."""
    return any(
        f"{name}.".startswith(f"{package}.")
        and importlib.util.find_spec(needed) is None
        for package, needed in NEEDS.items()
    )
