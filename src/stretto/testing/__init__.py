"""Strategies, instances, contract suites and an emulated model, for tests.

The library imports none of this package.

- Suites: `planner_suite` and `technique_suite` make `checks`; `backends` starts the
  ranks of `_backend_cases`, which use `_backend_bench`.
- Instances: `strategies` (of Hypothesis), `instances` (small jobs and networks),
  `models` (known models), `programs` (random training programs), and `soak` (a training
  run that plans again and again).
- `libra_stages` computes LIBRA's stages as printed, an oracle for its planner.
- `elastic_replay` trains in one process as the members of an elastic job did.
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
