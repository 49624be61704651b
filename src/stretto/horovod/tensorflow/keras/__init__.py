"""Horovod's names for Keras 3 on TensorFlow: `stretto.horovod.tensorflow.keras`.

- `callbacks`: the callbacks of ``fit`` (for `horovod.keras.callbacks`, and programs).
- `values`: operations on values outside of graphs (for programs).
- `optimizer`: `DistributedOptimizer` and `load_model` (for programs).
"""

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.functions import broadcast_object
from stretto.horovod.tensorflow.keras import callbacks
from stretto.horovod.tensorflow.keras.optimizer import DistributedOptimizer, load_model
from stretto.horovod.tensorflow.keras.values import (
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from stretto.horovod.tensorflow.mpi_ops import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from stretto.horovod.tensorflow.refused import (
    PartialDistributedOptimizer,
    broadcast_global_variables,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
