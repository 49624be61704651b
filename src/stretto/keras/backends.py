"""Reduction of gradients for each backend of Keras."""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import keras

from stretto.errors import SpecError
from stretto.horovod import world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.horovod.reduce_ops import ReduceOp


def backend_name() -> str:
    """Return Keras's backend.

    Raises:
        SpecError: it is neither TensorFlow nor JAX nor PyTorch.
    """
    name = str(keras.backend.backend())
    if name not in ("tensorflow", "jax", "torch"):
        raise SpecError(
            f"stretto.keras needs the backend tensorflow, jax or torch, got {name}: "
            "set KERAS_BACKEND before keras is imported"
        )
    return name


@functools.cache
def reducer(
    op: ReduceOp,
    sparse_as_dense: bool,  # noqa: FBT001
) -> Callable[[Sequence[Any]], list[Any]]:
    """Return the function that reduces a list of gradients, where None stays None."""
    name = backend_name()
    if name == "tensorflow":
        # Only this backend is certainly there.
        from stretto.horovod.tensorflow.gradients import reduce_gradients

        return functools.partial(
            reduce_gradients, op=op, sparse_as_dense=sparse_as_dense
        )
    return functools.partial(_in_jax if name == "jax" else _in_torch, op=op)


def _in_jax(gradients: Sequence[Any], op: ReduceOp) -> list[Any]:
    # Only this backend is certainly there.
    from stretto.jax import allreduce_gradients

    # None is a tree without leaves.
    return list(allreduce_gradients(list(gradients), op=op))


def _in_torch(gradients: Sequence[Any], op: ReduceOp) -> list[Any]:
    # Only this backend is certainly there.
    from stretto.horovod.torch.allreduce import reduced_in_sequence

    results = list(gradients)
    sent = [i for i, gradient in enumerate(results) if gradient is not None]
    if sent and world.size() > 1:
        tensors = [results[i].detach() for i in sent]
        # A name for each model: the engine keeps a group's members by its name.
        shapes = repr([(t.dtype, tuple(t.shape)) for t in tensors])
        name = f"gradients {zlib.crc32(shapes.encode())}"
        reduced = reduced_in_sequence(tensors, name, op)
        for i, value in zip(sent, reduced, strict=True):
            results[i] = value
    return results
