"""Operations on values outside of graphs; they return NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from stretto.horovod.reduce_ops import Average, ReduceOp
from stretto.horovod.tensorflow import operations
from stretto.horovod.tensorflow.compression import Compression


def _value(tensor: Any) -> np.ndarray[Any, Any]:
    return np.asarray(tensor.numpy())


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,  # noqa: FBT001
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> np.ndarray[Any, Any]:
    """Return a value reduced over all ranks; arguments are those of the operation.

    Raises:
        HorovodInternalError: ranks have different values, or a rank is lost.
        NotImplementedError: ``op`` is `Adasum`.
        ValueError: both ``op`` and ``average`` are given.
    """
    return _value(
        operations.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> np.ndarray[Any, Any]:
    """Return the ranks' values, joined along their first dimension.

    Raises:
        HorovodInternalError: ranks have different values, or a rank is lost.
    """
    return _value(operations.allgather(tf.convert_to_tensor(value), name))


def broadcast(
    value: Any, root_rank: int, name: str | None = None
) -> np.ndarray[Any, Any]:
    """Return the root rank's value on every rank.

    Raises:
        HorovodInternalError: ranks have different roots or values, or a rank is lost.
    """
    return _value(operations.broadcast(tf.convert_to_tensor(value), root_rank, name))


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average
) -> np.ndarray[Any, Any]:
    """Return this rank's rows of a value reduced over all ranks.

    Raises:
        HorovodInternalError: ranks have different values, or a rank is lost.
        NotImplementedError: ``op`` is `Adasum`.
    """
    return _value(
        operations.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
    )
