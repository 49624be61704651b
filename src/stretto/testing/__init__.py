"""Strategies, instances, contract suites and an emulated model, for tests.

The library imports none of this package; programs are tests, also those of others.

- `planner_suite`: the suite that planners must pass (for programs).
- `technique_suite`: the suite that techniques must pass (for programs).
- `checks`: checks of a contract as values (for `planner_suite` and `technique_suite`,
  and programs).
- `backends`: the suite that backends must pass, on ranks that it starts (for programs).
- `_backend_cases`: its checks (for `backends`).
- `_backend_bench`: a rank's access to the backend under test (for `backends`).
- `strategies`: strategies of Hypothesis (for programs).
- `instances`: small jobs and networks (for `planner_suite` and `technique_suite`).
- `models`: known models (for programs).
- `programs`: random training programs (for programs).
- `soak`: a training run that plans again and again (for programs).
- `libra_stages`: LIBRA's stages as printed, an oracle for its planner (for programs).
- `elastic_replay`: train in one process as the members of an elastic job did (for
  programs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.measure.emulated import EmulatedModel
    from stretto.testing.checks import Check
    from stretto.testing.elastic_replay import replay_memberships
    from stretto.testing.planner_suite import check_plan, planner_checks
    from stretto.testing.technique_suite import technique_checks

__all__ = [
    "Check",
    "EmulatedModel",
    "check_plan",
    "planner_checks",
    "replay_memberships",
    "technique_checks",
]

_HOMES = {
    "Check": "stretto.testing.checks",
    "EmulatedModel": "stretto.measure.emulated",
    "check_plan": "stretto.testing.planner_suite",
    "planner_checks": "stretto.testing.planner_suite",
    "replay_memberships": "stretto.testing.elastic_replay",
    "technique_checks": "stretto.testing.technique_suite",
}


__getattr__ = lazy_names("stretto.testing", _HOMES)  # the suites need no Hypothesis


def __dir__() -> list[str]:
    return __all__
