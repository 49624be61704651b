"""Functions for programs and commands: the packages below, wired together.

- `ddp`: `stretto.DDP`, which also runs scripts under `stretto run` (for `cli`,
  `elastic` and `script`, and programs).
- `planning`: plan, compare and simulate (for `cli` and `demo`, and programs).
- `measuring`: probes of networks and devices, and their fits (for `cli` and `demo`, and
  programs).
- `replaying`: replays of plans (for `cli.replay`).
- `burst`: profiles and plans of burst training (for `cli` and `papers`, and
  programs).
"""

from stretto._api.planning import compare, contributions, plan, simulate, timed_plan
from stretto.cost import cluster_at
from stretto.planners.base import with_prediction

__all__ = [
    "cluster_at",
    "compare",
    "contributions",
    "plan",
    "simulate",
    "timed_plan",
    "with_prediction",
]
