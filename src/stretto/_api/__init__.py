"""Functions for programs and commands: the packages below, wired together.

- `ddp`: `stretto.DDP`, which also runs scripts under `stretto run`.
- `planning`: plan, compare and simulate (for the commands and the demo).
- `measuring`: probes of networks and devices, and their fits (for `stretto probe`).
- `replaying`: replays of plans (for `stretto replay`).
- `burst`: profiles and plans of burst training (for `stretto burst`).
"""

from stretto._api.planning import compare, contributions, plan, simulate, timed_plan
from stretto.planners.base import with_prediction
from stretto.sim.scaling import cluster_at

__all__ = [
    "cluster_at",
    "compare",
    "contributions",
    "plan",
    "simulate",
    "timed_plan",
    "with_prediction",
]
