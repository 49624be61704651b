"""Execute a plan on torch.distributed.

The class for users:

- `ddp`: a DDP that executes a plan (shared, for instance by `demo.worker` and
  `_api.ddp`).
- `ddp_ranks`: its agreement, lanes and parameters (for `ddp_reducer`).
- `ddp_reducer`: its Reducer, and the replacement of that (for `ddp`).
- `torch_compat`: what is private in PyTorch (shared, for instance by `ddp` and
  `recording.step`).
- `plan_binding`: check a plan against a model (for `cli._rank_options`, `ddp` and
  `ddp_ranks`).
- `device_mesh`: this rank's shards of DTensors (for `ddp`).
- `static_graph`: count the gradients of a static graph (for `ddp` and `ddp_reducer`).
- `nan_check`: find invalid gradients (for `ddp` and `ddp_ranks`).
- `read_only`: values of a model that programs read (for `ddp`, `ddp_ranks` and
  `ddp_reducer`).
- `after_backward`: calls after reduced backwards (for `ddp_reducer`).

From buckets to peers:

- `sender`: send buckets on lanes (shared, for instance by `negotiated.send` and
  `burst.gradient_sync`).
- `bucket_schedule`: the lanes and slices of one bucket (shared, for instance by
  `negotiated.buckets` and `burst.gradient_sync`).
- `lanes`: collectives in order on each lane (shared, for instance by `ddp_ranks` and
  `burst.rank_groups`).
- `planned_group`: the process group of a Reducer with a plan (for `ddp_reducer`).
- `ddp_group`: the process group of a Reducer with DDP's own buckets (for
  `ddp_reducer`).
- `launch`: works and futures of launched buckets (shared, for instance by
  `planned_group` and `narrow_lanes`).
- `narrow_lanes`: buckets in narrower types (for `planned_group`).
- `backends`: open lanes.

Ranks:

- `ranks`: a process's place in a group, and the table of its model's parameters
  (shared, for instance by `horovod.meeting` and `store`).
- `store`: connections to a group's store (shared, for instance by `horovod.meeting` and
  `agreement`).
- `agreement`: compare values on all ranks (shared, for instance by `ddp_ranks` and
  `burst.executor`).
- `presence`: find lost ranks (shared, for instance by `store` and `backends.gloo`).
- `failure`: name them in one error (shared, for instance by `elastic.training` and
  `ddp_ranks`).
- `sockets`: find the sockets of lanes (for `backends.gloo`, `regroup` and `store`).
- `waits`: wait for collectives that may never end (shared, for instance by `failure`
  and `elastic.digests`).
- `time_limit`: calls that may hang (for `backends.nccl` and `tune.tuning_state`).
- `weak_call`: callbacks that do not keep their object alive (shared, for instance by
  `tune.controller` and `_api.ddp`).
- `quiesce`: wait for threads at the interpreter's exit, and for Gloo's workers (for
  `runtime` and `testing.programs`).
- `regroup`: make the default group of a new membership (for `elastic.training` and
  `horovod.torch.regrouping`).

Beside the planned order:

- `negotiated`: the engine for any order.
- `forward`: overlap communication with the next forward.
- `recording`: record steps.
- `exchange`: reduce NumPy arrays on the engine, for frameworks other than PyTorch
  (shared, for instance by `jax.operations` and `reduction_rounds`).
- `reduction_rounds`: number these reductions (shared, for instance by
  `horovod.tensorflow.gradients` and `horovod.world`).
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
