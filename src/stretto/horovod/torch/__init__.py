"""Horovod for PyTorch over stretto: `import stretto.horovod.torch as hvd`.

Operations:

- `allreduce`: values of all ranks combined (shared, for instance by `sync_batch_norm`
  and `keras3.epoch_callbacks`).
- `allgather`: tensors of all ranks concatenated (shared, for instance by `functions`
  and `reducescatter`).
- `alltoall`: a part of each rank's tensor to every rank (for `tensorflow.operations`,
  `allgather` and `mpi_ops`).
- `broadcast`: one rank's tensor on every rank (shared, for instance by `functions` and
  `numpy_arrays`).
- `reducescatter`: values combined, and each rank's rows of them (for
  `tensorflow.operations` and `mpi_ops`).
- `sparse`: sparse tensors of all ranks (for `gradients` and `mpi_ops`).
- `submission`: send calls to the engine (shared, for instance by `allreduce` and
  `allgather`).
- `compression`: an argument of operations (shared, for instance by `allreduce` and
  `reducescatter`).
- `mpi_ops`: all operations under Horovod's module name (for `keras.ranks`, and
  programs).
- `built`: report features (for `tensorflow.mpi_ops` and `mpi_ops`).

Training:

- `optimizer`: `DistributedOptimizer` (for programs).
- `gradients`: hooks on parameters, and the wait for their results (for `elastic` and
  `optimizer`).
- `functions`: parameters, states and objects to all ranks (shared, for instance by
  `elastic` and `keras3.epoch_callbacks`).
- `sync_batch_norm`: batch normalization over all ranks (for programs).
- `elastic`: training that ranks join and leave (for programs).
- `regrouping`: follow a job's memberships in the same processes (for `elastic`).
- `commits`: state on disk for the processes of a restarted job (for `elastic`).
"""

from stretto.horovod.exceptions import HostsUpdatedInterrupt
from stretto.horovod.torch import elastic
from stretto.horovod.torch.compression import Compression
from stretto.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from stretto.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)
from stretto.horovod.torch.optimizer import DistributedOptimizer
from stretto.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
