"""Execute a plan on torch.distributed.

- `ddp` is the class for users, on `ddp_ranks` (agreement, lanes, parameters) and
  `ddp_reducer` (the Reducer and its replacement). `torch_compat` holds what is private
  in PyTorch, `plan_binding` checks a plan against a model, `device_mesh` takes this
  rank's shards of DTensors, `static_graph` counts gradients, `nan_check` finds invalid
  ones, and `read_only` shows values.
- `sender` sends buckets on `lanes`, each by its `bucket_schedule`. `planned_group` and
  `ddp_group` are the process groups of Reducers, with `launch` (works and futures) and
  `narrow_lanes` (narrower types).
- `ranks`, `store` and `agreement` are how ranks meet; `presence` and `failure` how lost
  ranks are found and named. `after_backward`, `weak_call`, `time_limit`, `sockets`,
  `waits` and `quiesce` serve them.
- `regroup`: make the default group of a new membership (for `elastic.training` and
  `horovod.torch.regrouping`).
- `backends` open lanes, `negotiated` is the engine for any order, `forward` overlaps
  communication with the next forward, and `recording` records steps. `exchange` reduces
  NumPy arrays on the engine and `reduction_rounds` number these reductions, for
  frameworks other than PyTorch (`stretto.jax`, `stretto.horovod.tensorflow`).
"""

# Import first, so that its exit handler runs last.
from stretto.runtime import quiesce as _quiesce  # noqa: F401
from stretto.runtime.ddp import DistributedDataParallel
from stretto.runtime.ranks import TensorRow
from stretto.runtime.recording.step import AbstractStepObserver, Recorder

__all__ = [
    "AbstractStepObserver",
    "DistributedDataParallel",
    "Recorder",
    "TensorRow",
]
