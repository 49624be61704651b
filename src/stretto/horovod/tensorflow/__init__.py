"""Horovod for TensorFlow 2: `import stretto.horovod.tensorflow as hvd`, experimental.

- `operations`: one operation each (shared, for instance by `keras.values` and
  `sync_batch_norm`).
- `functions`: variables and objects to all ranks (for programs).
- `compression`: an argument of operations, tapes and optimizers (shared, for instance
  by `operations` and `keras.optimizer`).
- `mpi_ops`: operations under Horovod's module name (for programs).
- `tape`: `DistributedGradientTape` (for `optimizer`, and programs).
- `optimizer`: `DistributedOptimizer` (for `keras.optimizer`, and programs).
- `gradients`: send gradients during backward (for `optimizer`, `tape` and
  `keras.backends`).
- `sync_batch_norm`: batch normalization over all ranks (for programs).
- `keras`: Horovod's names for Keras.
- `host_calls`: Python functions called from a graph (shared, for instance by
  `operations` and `gradients`).
- `refused`: names that are not provided (for programs).
"""

from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from stretto.horovod.tensorflow.mpi_ops import (
    add_process_set,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from stretto.horovod.tensorflow.optimizer import DistributedOptimizer
from stretto.horovod.tensorflow.refused import (
    BroadcastGlobalVariablesHook,
    PartialDistributedGradientTape,
    broadcast_global_variables,
)
from stretto.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from stretto.horovod.tensorflow.tape import DistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
