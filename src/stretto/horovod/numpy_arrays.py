"""Operations on NumPy arrays, through those on tensors."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.torch.broadcast import broadcast_async_
from stretto.horovod.torch.submission import synchronize
from stretto.runtime.exchange import tensor_of, wire_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.horovod.torch.submission import Operation

Array = np.ndarray[Any, Any]


def tensor_copy(array: Any, what: str = "value") -> torch.Tensor:
    """Return a tensor with an array's values, in memory of its own.

    Raises:
        SpecError: the dtype can't be sent.
    """
    copy = np.array(array, order="C")
    wire_dtype(copy.dtype, what)
    return tensor_of(copy)


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Return a tensor's memory as an array of the dtype that it was made from."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return np.asarray(tensor.numpy())


def run(start: Callable[..., Operation], array: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an asynchronous operation on a copy of an array, and wait for its result.

    Raises:
        HorovodInternalError: it failed.
        ValueError: as the operation's.
        SpecError: the dtype can't be sent.
    """
    array = np.asarray(array)
    result = synchronize(start(tensor_copy(array), *args, **kwargs))
    return array_of(result, array.dtype)


def broadcast_arrays(
    arrays: Sequence[Any],
    root_rank: int,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return rank ``root_rank``'s arrays on all ranks; shapes and dtypes are equal.

    Raises:
        HorovodInternalError: ranks have different arrays, or a rank is lost.
    """
    found = [np.asarray(array) for array in arrays]
    under_way = [
        broadcast_async_(
            tensor_copy(array, f"{name} {i}"), root_rank, f"{name} {i}", process_set
        )
        for i, array in enumerate(found)
    ]
    return [
        array_of(synchronize(operation), array.dtype)
        for operation, array in zip(under_way, found, strict=True)
    ]


def pickled(obj: Any) -> Array:
    """Return an object's bytes."""
    return np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)
