"""Gradients reduced over ranks, sent while backward computes the next ones.

# Note [Submit]
Each gradient is sent by a call that doesn't wait, in reverse order of the variables, as
backward computes the last ones first. One call waits for all. A call per gradient that
waited would send one at a time, and if it ran whenever its gradient is ready, ranks
with few threads would deadlock. Small gradients are sent by one
call, because a call takes some 50 microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from stretto.errors import SpecError
from stretto.horovod import world
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import (
    ENGINE_OPS,
    Average,
    ReduceOp,
    Sum,
    require_no_adasum,
)
from stretto.horovod.tensorflow.host_calls import (
    TOKEN,
    host_call,
    is_alone,
    not_converted,
    require_no_xla,
    require_one_device,
)
from stretto.horovod.tensorflow.operations import gathered_slices
from stretto.runtime.exchange import ArrayRow
from stretto.runtime.negotiated import Op
from stretto.runtime.reduction_rounds import RoundRows, Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_JOINED_BYTES = 2**20
"""Neighboring gradients up to this size together are sent by one call."""


@not_converted
def reduce_gradients(
    gradients: Sequence[Any],
    *,
    op: ReduceOp = Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return gradients reduced over ranks, in a `tf.function` or eagerly.

    All ranks must call it equally often, with as many gradients of equal shapes and
    dtypes. In a `tf.function` each gradient leaves when it is ready.

    Args:
        gradients: Dense tensors, ``tf.IndexedSlices``, or None, which stays None.
        op: The reduction.
        prescale: Factor on each rank's values before the reduction.
        postscale: Factor on the results.
        sparse_as_dense: Whether to reduce ``tf.IndexedSlices`` as dense tensors. If
            not, all ranks' slices are gathered after backward.
        process_set: The participating ranks.

    Raises:
        SpecError: a shape isn't known while tracing, a dtype can't be sent, several
            devices are in use, or gathered slices have an op other than Average and
            Sum.
        ValueError: this rank is not in the set.
        NotImplementedError: ``op`` is `Adasum`.
    """
    require_no_adasum(op, "a reduction of gradients")
    member = world.current().member(process_set)
    results = list(gradients)
    if sparse_as_dense:
        results = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in results
        ]
    if is_alone(len(member.ranks)):
        return [_scaled(g, prescale * postscale) for g in results]
    require_one_device()
    require_no_xla()
    dense = [
        i
        for i, g in enumerate(results)
        if g is not None and not isinstance(g, tf.IndexedSlices)
    ]
    if dense:
        tensors = [tf.convert_to_tensor(results[i]) for i in dense]
        what = RoundRows(
            tuple(_row(i, t) for i, t in zip(dense, tensors, strict=True)),
            ENGINE_OPS[ReduceOp(op)],
            prescale=float(prescale),
            postscale=float(postscale),
        )
        reduced = _reduce(tensors, what, process_set)
        for i, value in zip(dense, reduced, strict=True):
            results[i] = value
    for i, g in enumerate(results):
        if isinstance(g, tf.IndexedSlices):
            if op not in (Average, Sum):
                raise SpecError(
                    "tf.IndexedSlices can be reduced with op=Average or op=Sum, got "
                    f"{op!r}. Pass sparse_as_dense=True for others."
                )
            results[i] = gathered_slices(g, op, process_set, prescale * postscale)
    return results


def on_values(gradient: Any, function: Callable[[Any], Any]) -> Any:
    """Return a gradient with a function applied to its values; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def _scaled(gradient: Any, factor: float) -> Any:
    if factor == 1.0:
        return gradient
    return on_values(gradient, lambda values: values * tf.cast(factor, values.dtype))


def _row(number: int, tensor: Any) -> ArrayRow:
    # Names of variables and graphs count models, which ranks may build unequally.
    name = f"gradient {number}"
    if not tensor.shape.is_fully_defined():
        raise SpecError(
            f"{name} has shape {tensor.shape}, which isn't known while the function is "
            "traced: give its variable a shape, for instance with tf.ensure_shape"
        )
    return ArrayRow(
        name=name,
        shape=tuple(tensor.shape),
        dtype=np.dtype(tensor.dtype.as_numpy_dtype),
    )


def _groups(what: RoundRows) -> list[list[int]]:
    """Return the rows that each call sends, in the order of the calls."""
    groups: list[list[int]] = []
    joined = 0
    for i in reversed(range(len(what.rows))):
        size = what.rows[i].bytes
        if not groups or joined + size > _JOINED_BYTES:
            groups.append([])
            joined = 0
        groups[-1].append(i)
        joined += size
    return groups


def _reduce(
    tensors: Sequence[Any], what: RoundRows, process_set: ProcessSet
) -> list[Any]:
    """Reduce tensors; the gradient is the same reduction of gradients."""

    # What is called has no gradient: an outer tape would drop the term silently.
    @tf.custom_gradient
    def reduced(*values: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            if what.op not in (Op.SUM, Op.AVERAGE):
                raise SpecError(
                    "derivatives through a reduction of gradients need op=Average or "
                    f"op=Sum, got {what.op.name}"
                )
            return _reduce(upstream, what, process_set)

        return _run(values, what, process_set), gradient

    return list(reduced(*tensors))


def _run(tensors: Sequence[Any], what: RoundRows, process_set: ProcessSet) -> list[Any]:
    def rounds() -> Rounds:
        # At the time of the call: the world may have ended and begun again.
        return world.current().member(process_set).rounds

    def begin() -> list[Any]:
        return [np.float32(rounds().begin(what))]

    def submit(rows: Sequence[int]) -> Any:
        def send(ticket: Any, *arrays: Any) -> list[Any]:
            for i, array in zip(rows, arrays, strict=True):
                rounds().submit(int(ticket), i, array)
            return [np.float32(0)]

        return send

    def wait(ticket: Any, *_tokens: Any) -> list[Any]:
        rounds().wait(int(ticket))
        return rounds().results(int(ticket))

    (ticket,) = host_call(begin, [], [TOKEN])
    tokens = [
        host_call(submit(rows), [ticket, *(tensors[i] for i in rows)], [TOKEN])[0]
        for rows in _groups(what)
    ]
    specs = [tf.TensorSpec(row.shape, row.dtype) for row in what.rows]
    return host_call(wait, [ticket, *tokens], specs)
