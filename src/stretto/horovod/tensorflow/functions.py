"""Send variables and objects to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from stretto.horovod import torch as on_tensors
from stretto.horovod.numpy_arrays import broadcast_arrays
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.tensorflow.host_calls import host_call, not_converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@not_converted
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> None:
    """Assign the root rank's values to variables on all ranks.

    Args:
        variables: Variables of TensorFlow or Keras, in the same order on all ranks.
        root_rank: The global rank whose values are sent.
        process_set: The participating ranks; all of them must call this.
        inplace: Has no effect.

    Raises:
        HorovodInternalError: ranks have different variables, or a rank is lost.
        ValueError: this rank is not in the set, or a dtype can't be sent.
    """
    del inplace
    variables = list(variables)
    if not variables:
        return
    tensors = [tf.convert_to_tensor(variable) for variable in variables]

    def run(*arrays: Any) -> list[Any]:
        return list(broadcast_arrays(arrays, root_rank, "variables", process_set))

    found = host_call(run, tensors, [tf.TensorSpec(t.shape, t.dtype) for t in tensors])
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the root rank, on every rank.

    Objects are pickled; call it outside of a `tf.function`.

    Raises:
        HorovodInternalError: ranks have different names or roots.
        NotImplementedError: ``session`` is given.
        ValueError: a rank is not in the process set.
    """
    _refuse_session(session)
    return on_tensors.broadcast_object(obj, root_rank, name or "object", process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` with these arguments.

    Raises:
        NotImplementedError: ``session`` is given.
    """
    _refuse_session(session)
    return lambda obj: broadcast_object(
        obj, root_rank, name=name, process_set=process_set
    )


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return every rank's object, by rank.

    Objects are pickled; call it outside of a `tf.function`.

    Raises:
        HorovodInternalError: ranks have different names.
        NotImplementedError: ``session`` is given, or a process set that isn't global.
    """
    _refuse_session(session)
    if process_set is not global_process_set:
        raise NotImplementedError(
            "allgather_object is provided for all ranks only: gather pickled bytes "
            "with allgather(..., process_set=...)"
        )
    return on_tensors.allgather_object(obj, name or "object")


def _refuse_session(session: Any) -> None:
    if session is not None:
        raise NotImplementedError(
            "sessions are TensorFlow 1's and not provided: call without session="
        )
