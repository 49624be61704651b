"""Strategies, instances and contract suites for tests; the library imports none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.testing.checks import Check
    from stretto.testing.planner_suite import check_plan, planner_checks
    from stretto.testing.technique_suite import technique_checks

__all__ = ["Check", "check_plan", "planner_checks", "technique_checks"]

_HOMES = {
    "Check": "checks",
    "check_plan": "planner_suite",
    "planner_checks": "planner_suite",
    "technique_checks": "technique_suite",
}


def __getattr__(name: str) -> Any:
    """Import a name's module on first use: the suites need no Hypothesis."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stretto.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
