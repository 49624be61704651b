"""Simulate one step under a plan, and bound what any plan can reach.

One model has two evaluations: `engine` is the reference, and `step_model` is some 20 to
80 times as fast. Tests compare each with the other, and with
`stretto.testing.libra_stages` for one lane.

The reference:

- `engine`: run flows from event to event (for `flows`, `forward` and `step`).
- `step`: one step of a plan, with times and a timeline (shared, for instance by
  `tune.calibration` and `_api.planning`).
- `flows`: a plan as flows (shared, for instance by `forward` and `step`).
- `forward`: steps whose all-reduces, or DeAR's halves, overlap with the next forward
  (for `step`).
- `fair`: how flows share links, in both evaluations (for `burst`, `engine` and
  `network`).

For searches:

- `step_model`: the times alone (shared, for instance by `tune.calibration` and
  `planners._joint.search`).
- `network`: a cluster's figures (for `step_model`).
- `lanes`: the loops over lanes (for `gated_lanes` and `step_model`).
- `gated_lanes`: those for overlap with the next forward (for `step_model`).
- `replay`: plans to be evaluated under many networks (for `step_model` and
  `tune.calibration`).

What no plan can beat:

- `bounds`: bounds on steps that end with their sends (for `forward_bounds`, `scaling`
  and `scope`, and programs).
- `forward_bounds`: bounds for overlap with the next forward (for `scaling` and `scope`,
  and programs).
- `certificate`: bounds by linear programming (for `bounds`).
- `scope`: families of plans, and the bound over each (for `planners._joint.space`,
  `planners.base` and `tune.calibration`).
- `scaling`: steps and bounds over numbers of ranks (for programs).

Burst plans:

- `burst`: steps of burst plans (for `planners.burst.collocated` and
  `planners.burst.simulated`).
- `_burst_script`: what each rank does in one (for `burst`).
- `sample_layout`: which rank has which samples in them (shared, for instance by
  `burst.forward_exchange` and `burst.schedule`).
- `collocation`: such a step with a background job beside each rank (for
  `cluster.job_plans`, `cluster.speeds` and `planners.burst.collocated`).
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
