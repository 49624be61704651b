"""Names of a package whose modules are imported on first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def imported(home: str) -> Any:
    """Import a module, named as ``module:name``, and return its value of that name."""
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports modules on first use.

    Args:
        package: The package's full name.
        homes: The full name of the module that defines each name. For a name that its
            module spells differently, ``module:name``.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = imported(home if ":" in home else f"{home}:{name}")
        setattr(sys.modules[package], name, value)
        return value

    return find
