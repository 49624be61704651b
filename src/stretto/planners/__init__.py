"""Planners: one contract, one file per method, and their registry.

- `base`: the contract, and drafts as plans (shared, for instance by `_joint.starts` and
  `_joint.search`).
- `registry`: planners by name, with those of installed packages (shared, for instance
  by `wire` and `tune.forced`).
- `wire`: plans in narrower types (shared, for instance by `tune.calibration` and
  `_api.planning`).
- `_coarse`: smaller workloads for searches (for `_joint.starts`, `joint` and `libra`).
- `_orders`: orders of tensors in which buckets are contiguous (shared, for instance by
  `joint` and `ddp`).
- `burst`: plans of the GPUs of each layer.
- `_joint`: the search of `joint`.
- `_libra`: the search of `libra` and `libra_m`.

One method each:

- `single`: everything in one bucket after backward (for `exhaustive`, `joint` and
  `registry`).
- `wfbp`: every gradient on its own (for `joint`, `libra_m` and `registry`).
- `ddp`: PyTorch's bucket rule (shared, for instance by `exhaustive` and `joint`).
- `horovod`: Horovod's fusion buffer and cycle time (for `joint`, `libra_m` and
  `registry`).
- `mg_wfbp`: MG-WFBP's greedy merging (for `joint`, `libra_m` and `registry`).
- `fusion`: exact sequential fusion (shared, for instance by `_joint.starts` and
  `libra`).
- `asc_wfbp`: each gradient alone, merged, or beside the previous one (for `joint` and
  `registry`).
- `libra`: fusion and the resource of each bucket (for `joint` and `registry`).
- `libra_m`: the resource of each bucket of a given fusion (for `joint` and `registry`).
- `aiacc`: units of equal size on several lanes (shared, for instance by `joint` and
  `tune.search_space`).
- `dear`: all-reduces in halves, one during forward (for `registry`).
- `joint`: all of these choices, on the simulator; the default (shared, for instance by
  `cli._planning` and `_api.planning`).
- `exhaustive`: brute force, an oracle for tests (for `registry`).
"""

from stretto.planners.base import AbstractPlanner, Draft, dtype_starts, finish
from stretto.planners.registry import NAMES, get, options_of
from stretto.planners.wire import plan_with_wire

__all__ = [
    "NAMES",
    "AbstractPlanner",
    "Draft",
    "dtype_starts",
    "finish",
    "get",
    "options_of",
    "plan_with_wire",
]
