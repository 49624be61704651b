"""Strategies, instances, contract suites and an emulated model, for tests.

The library imports none of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.measure.emulated import EmulatedModel
    from stretto.testing.checks import Check
    from stretto.testing.planner_suite import check_plan, planner_checks
    from stretto.testing.technique_suite import technique_checks

__all__ = [
    "Check",
    "EmulatedModel",
    "check_plan",
    "planner_checks",
    "technique_checks",
]

_HOMES = {
    "Check": "stretto.testing.checks",
    "EmulatedModel": "stretto.measure.emulated",
    "check_plan": "stretto.testing.planner_suite",
    "planner_checks": "stretto.testing.planner_suite",
    "technique_checks": "stretto.testing.technique_suite",
}


__getattr__ = lazy_names("stretto.testing", _HOMES)  # the suites need no Hypothesis


def __dir__() -> list[str]:
    return __all__
