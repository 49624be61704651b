"""Data-parallel training with Keras 3: `import stretto.keras`, experimental.

With the backends TensorFlow, JAX and PyTorch. Each process trains its own model on its
own samples, and its optimizer averages gradients over processes before it applies them.
Callbacks are those of `stretto.horovod.keras3`.

- `optimizer`: `DistributedOptimizer` (for `models`, and programs).
- `backends`: what reduces a backend's gradients (for `optimizer` and `ranks`).
- `models`: `load_model`, `broadcast_model` (for programs).
- `ranks`: init, rank, size, and values of all ranks (for programs).
"""

from stretto.horovod.keras3.epoch_callbacks import (
    BroadcastInitialState,
    LearningRateWarmup,
    MetricAverage,
)
from stretto.horovod.reduce_ops import Average, Max, Min, Product, Sum
from stretto.keras.models import broadcast_model, load_model
from stretto.keras.optimizer import DistributedOptimizer
from stretto.keras.ranks import (
    allreduce,
    barrier,
    broadcast_object,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shard,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "BroadcastInitialState",
    "DistributedOptimizer",
    "LearningRateWarmup",
    "Max",
    "MetricAverage",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "barrier",
    "broadcast_model",
    "broadcast_object",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "shard",
    "shutdown",
    "size",
]
