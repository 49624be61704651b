"""Planners: one contract, one file per method, and their registry.

- `base`: the contract, and drafts as plans; `registry`: planners by name, with those of
  installed packages; `wire`: plans in narrower types.
- `single`, `wfbp`, `ddp`, `horovod`, `mg_wfbp`, `fusion`, `asc_wfbp`, `libra`,
  `libra_m`, `aiacc`, `dear`, `joint`, `exhaustive`: one method each; `joint` is the
  default and `exhaustive` an oracle for tests.
- `_coarse` and `_orders`: smaller workloads, and orders of tensors, for searches.
- `_joint` and `_libra`: the searches of these planners; `burst`: plans of the GPUs of
  each layer.
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
