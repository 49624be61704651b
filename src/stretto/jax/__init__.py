"""Data-parallel training with JAX: `import stretto.jax`, experimental.

Each process runs its own plain `jax.jit` on its own device. Gradients leave within
backward, over the negotiated engine, while XLA computes.

- `gradients`: `value_and_grad`, `grad`, `allreduce_gradients`, `distributed` (for
  `keras.backends`, and programs).
- `tags`: parameters that submit their gradients from within backward (for `gradients`,
  and programs).
- `accumulation`: the mean gradient of several steps (for `gradients`).
- `operations`: other collectives, in and outside of `jit` (for programs).
- `ranks`: init, rank, size (shared, for instance by `operations` and `callbacks`).
- `refusals`: what a reduction can't be within (for `gradients` and `operations`).
- `xla_options`: `compile_options`, where communication is left to XLA (for programs).
- `callbacks`: Python functions that XLA calls in a computation (for `gradients`,
  `operations` and `tags`).
"""

from stretto.horovod.reduce_ops import Average, Max, Min, Product, Sum
from stretto.jax.gradients import (
    allreduce_gradients,
    distributed,
    grad,
    value_and_grad,
)
from stretto.jax.operations import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_object,
)
from stretto.jax.ranks import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shard,
    shutdown,
    size,
)
from stretto.jax.tags import in_backward
from stretto.jax.xla_options import compile_options

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "compile_options",
    "distributed",
    "grad",
    "in_backward",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shard",
    "shutdown",
    "size",
    "value_and_grad",
]
