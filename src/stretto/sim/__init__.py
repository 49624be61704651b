"""Simulate one step under a plan, and bound what any plan can reach.

One model, two evaluations:

- `engine` runs flows from event to event: the reference. `step` builds its flows from
  a plan (`flows`) and returns times and a timeline; `forward` does so for overlap with
  the next forward, by whole all-reduces or DeAR's halves.
- `step_model` gives the same times to searches, some 20 to 80 times as fast, without
  timelines. `network` holds a cluster's figures, `lanes` the loops, `gated_lanes` those
  for overlap with the next forward, and `replay` plans to be evaluated under many
  networks.

Both share links by `fair`. Tests compare each with the other, and with
`stretto.testing.libra_stages` for one lane.

Beside them: `bounds`, `forward_bounds`, `certificate` and `scope` (what no plan can
beat), `scaling` (steps over numbers of ranks, for programs), `burst` with
`_burst_script` (steps of burst plans), `sample_layout` (which rank has which samples in
them), and `collocation` (such a step with a background job beside each rank).
"""

from stretto.sim.bounds import LowerBound, lower_bound
from stretto.sim.forward_bounds import forward_bound_s
from stretto.sim.step import StepResult, simulate_step
from stretto.sim.step_model import StepModel

__all__ = [
    "LowerBound",
    "StepModel",
    "StepResult",
    "forward_bound_s",
    "lower_bound",
    "simulate_step",
]
