"""Init and shutdown, rank and size, and values of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.horovod import torch as on_tensors
from stretto.horovod import world
from stretto.horovod.numpy_arrays import run
from stretto.horovod.reduce_ops import Average, ReduceOp
from stretto.keras.backends import backend_name


def init() -> None:
    """Join the job's ranks; wait for all of them. A second call does nothing.

    Ranks are found through the variables of torchrun, ``stretto run`` or Horovod's
    launchers. A process without a launcher is a job of one rank.

    Raises:
        SpecError: Keras has another backend than TensorFlow, JAX and PyTorch, or JAX
            has several devices in this process.
        HorovodInternalError: ranks have different settings, or a rank did not arrive.
    """
    name = backend_name()
    if name == "tensorflow":
        # Only this backend is certainly there.
        from stretto.horovod.tensorflow.host_calls import init as join
    elif name == "jax":
        # The same.
        from stretto.jax import init as join
    else:
        join = world.init
    join()


def shutdown() -> None:
    """Leave the job; nothing without `init`. All ranks should call it.

    At the end of a process it is called by itself.
    """
    if backend_name() == "jax":
        # Only this backend is certainly there.
        from stretto.jax import shutdown as leave
    else:
        leave = world.shutdown
    leave()


def is_initialized() -> bool:
    """Return whether `init` was called without a later `shutdown`."""
    return world.is_initialized()


def rank() -> int:
    """Return this process's rank.

    Raises:
        ValueError: `init` was not called. The functions below raise it too.
    """
    return world.rank()


def size() -> int:
    """Return the number of ranks."""
    return world.size()


def local_rank() -> int:
    """Return this process's rank on its host."""
    return world.local_rank()


def local_size() -> int:
    """Return the number of ranks on this host."""
    return world.local_size()


def shard(n: int) -> range:
    """Return this rank's indices out of ``n`` samples, an equal part for each rank.

    Raises:
        SpecError: ``n`` is not a multiple of the number of ranks; an average of ranks
            would then weight samples unequally.
    """
    return world.shard(n)


def allreduce(value: Any, *, op: ReduceOp = Average) -> np.ndarray[Any, Any]:
    """Return a number or an array reduced over ranks; call it outside of graphs.

    Raises:
        HorovodInternalError: ranks have different shapes or dtypes, or a rank is lost.
        SpecError: the dtype can't be sent.
    """
    found: np.ndarray[Any, Any] = run(
        on_tensors.allreduce_async, np.asarray(value), op=op
    )
    return found


def broadcast_object(obj: Any, root: int = 0) -> Any:
    """Return rank ``root``'s object on all ranks. It is pickled.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    return on_tensors.broadcast_object(obj, root, name="object")


def barrier() -> None:
    """Wait until all ranks have called it.

    Raises:
        HorovodInternalError: a rank is lost.
    """
    on_tensors.barrier()
