"""One operation each, in a `tf.function` or eagerly; differentiable.

An operation waits for its result within its call, so all ranks run operations in the
order of their programs. Arguments that choose devices and name scopes are accepted and
have no effect: there is one device, and unnamed operations are numbered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from stretto.horovod import world
from stretto.horovod.numpy_arrays import array_of, tensor_copy
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import (
    Average,
    ReduceOp,
    Sum,
    reduction_of,
    require_no_adasum,
)
from stretto.horovod.tensorflow.compression import Compression
from stretto.horovod.tensorflow.host_calls import host_call, not_converted
from stretto.horovod.torch.allgather import grouped_allgather_async
from stretto.horovod.torch.allreduce import grouped_allreduce_async
from stretto.horovod.torch.alltoall import alltoall_async
from stretto.horovod.torch.broadcast import broadcast_async
from stretto.horovod.torch.reducescatter import grouped_reducescatter_async
from stretto.horovod.torch.submission import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _call(
    start: Callable[..., Any], tensors: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """Run a grouped operation; ``start`` gets a list of torch's tensors."""
    specs = [
        tf.TensorSpec(shape, t.dtype) for t, shape in zip(tensors, shapes, strict=True)
    ]

    def run(*arrays: Any) -> list[Any]:
        copies = [tensor_copy(array) for array in arrays]
        results = synchronize(start(copies))
        return [
            array_of(result, array.dtype)
            for result, array in zip(results, arrays, strict=True)
        ]

    return host_call(run, tensors, specs)


def _open_rows(tensor: Any) -> Any:
    """Return a tensor's shape with an unknown first dimension."""
    if tensor.shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None, *tensor.shape[1:]])


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [tf.convert_to_tensor(value) for value in values]


# All-reduce.


def _allreduce(
    tensors: Sequence[Any],
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[Any]:
    """Reduce tensors as one group; the gradient is the same reduction of gradients."""

    @tf.custom_gradient
    def reduced(*values: Any) -> Any:
        def start(copies: Any) -> Any:
            return grouped_allreduce_async(
                copies, None, name, op, prescale_factor, postscale_factor, process_set
            )

        found = _call(start, values, [v.shape for v in values])

        def gradient(*upstream: Any) -> Any:
            return _allreduce(
                upstream, op, None, prescale_factor, postscale_factor, process_set
            )

        return found, gradient

    return list(reduced(*_tensors(tensors)))


@not_converted
def allreduce(
    tensor: Any,
    average: bool | None = None,  # noqa: FBT001
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Reduce a tensor over all ranks.

    Ranks match operations by ``name``; unnamed operations are numbered in call order.
    Shape, dtype and reduction must be the same on every rank.

    Args:
        tensor: A tensor, a variable, or ``tf.IndexedSlices``, of which all ranks' rows
            are gathered.
        average: Older form of ``op``: true is `Average`, false `Sum`.
        device_dense: Has no effect.
        device_sparse: Has no effect.
        compression: Applied on the wire.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: Factor on every rank's values before they are combined.
        postscale_factor: Factor on the combined values.
        name: Unique among operations of this kind that are under way.
        process_set: The participating ranks; all of them must call this.
        ignore_name_scope: Has no effect.

    Raises:
        ValueError: both ``op`` and ``average`` are given, the dtype is not supported,
            or this rank is not in the set. While a graph executes, errors arrive as
            TensorFlow's own, with this one's text.
        NotImplementedError: ``op`` is `Adasum`, or ``tf.IndexedSlices`` are combined
            with an op other than Average and Sum, or with factors.
        HorovodInternalError: ranks have different tensors, or a rank is lost.
    """
    del device_dense, device_sparse, ignore_name_scope
    op = reduction_of(op, average)
    require_no_adasum(op, "an all-reduce")
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(
            tensor, op, prescale_factor, postscale_factor, process_set
        )
    sent, context = compression.compress(tf.convert_to_tensor(tensor))
    (reduced,) = _allreduce(
        [sent], op, name, prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(reduced, context)


def _allreduce_slices(
    slices: Any,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Any:
    if op not in (Average, Sum):
        raise NotImplementedError(
            "tf.IndexedSlices can be reduced with op=Average or op=Sum, got "
            f"{op.name}. Convert them with tf.convert_to_tensor first."
        )
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor aren't provided for "
            "tf.IndexedSlices: multiply their values instead"
        )
    return gathered_slices(slices, op, process_set)


def gathered_slices(
    slices: Any, op: ReduceOp, process_set: ProcessSet, factor: float = 1.0
) -> Any:
    """Return all ranks' slices, scaled so that their dense form is the reduction.

    Args:
        slices: ``tf.IndexedSlices``.
        op: Average or Sum.
        process_set: The participating ranks.
        factor: A further factor on the values.
    """
    size = len(world.current().member(process_set).ranks)

    @tf.custom_gradient
    def counted(values: Any) -> Any:
        # Derivatives as in `_allreduce`; an all-gather's is a mean, of one rank's rows.
        return tf.identity(values), lambda upstream: upstream * size

    values = allgather(counted(slices.values), process_set=process_set)
    indices = allgather(slices.indices, process_set=process_set)
    scale = factor / size if op == Average else factor
    if scale != 1.0:
        values *= tf.cast(scale, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,  # noqa: FBT001
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    name: str | None = None,
) -> list[Any]:
    """Run `allreduce` for tensors that start together, and fail together.

    Raises:
        ValueError: as in `allreduce`.
        NotImplementedError: as in `allreduce`.
        HorovodInternalError: as in `allreduce`.
    """
    del device_dense, device_sparse, ignore_name_scope
    op = reduction_of(op, average)
    require_no_adasum(op, "an all-reduce")
    if not tensors:
        return list(tensors)
    results: list[Any] = list(tensors)
    dense = [i for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)]
    pairs = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
    reduced = _allreduce(
        [sent for sent, _ in pairs],
        op,
        name,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    for i, value, (_, context) in zip(dense, reduced, pairs, strict=True):
        results[i] = compression.decompress(value, context)
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = _allreduce_slices(
                tensor, op, prescale_factor, postscale_factor, process_set
            )
    return results


# All-gather.


@not_converted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Join the ranks' tensors along their first dimension, in rank order.

    The first dimension may differ between ranks, the others must not. As in Horovod,
    the gradient is the mean of the ranks' gradients of this rank's rows.

    Raises:
        HorovodInternalError: ranks have different dtypes or other dimensions, or a rank
            is lost.
        ValueError: the dtype is not supported, or this rank is not in the set.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@not_converted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Run `allgather` for tensors that start together, and fail together.

    Raises:
        HorovodInternalError: as in `allgather`.
        ValueError: as in `allgather`.
    """
    del ignore_name_scope
    if not tensors:
        return list(tensors)

    @tf.custom_gradient
    def gathered(*values: Any) -> Any:
        def start(copies: Any) -> Any:
            return grouped_allgather_async(copies, name, process_set)

        found = _call(start, values, [_open_rows(v) for v in values])
        rows = [tf.shape(v)[:1] for v in values]

        def gradient(*upstream: Any) -> Any:
            means = _allreduce(upstream, Average, None, 1.0, 1.0, process_set)
            counts = grouped_allgather(rows, process_set=process_set)
            own = process_set.rank() or 0
            parts = [
                tf.slice(
                    mean,
                    tf.concat(
                        [
                            tf.reduce_sum(count[:own], keepdims=True),
                            tf.zeros([tf.rank(mean) - 1], tf.int32),
                        ],
                        0,
                    ),
                    tf.shape(value),
                )
                for mean, count, value in zip(means, counts, values, strict=True)
            ]
            return parts[0] if len(parts) == 1 else parts

        return found, gradient

    return list(gathered(*_tensors(tensors)))


# Broadcast.


@not_converted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root rank's tensor on every rank.

    As in Horovod, the gradient is the mean of the ranks' gradients on the root, and
    zero elsewhere.

    Args:
        tensor: The same shape and dtype on every rank.
        root_rank: The global rank whose values are sent.
        name: Unique among operations of this kind that are under way.
        ignore_name_scope: Has no effect.
        process_set: The participating ranks; all of them must call this.

    Raises:
        HorovodInternalError: ranks have different roots or tensors, or a rank is lost.
        ValueError: the dtype is not supported, or this rank is not in the set.
    """
    del ignore_name_scope

    @tf.custom_gradient
    def sent(value: Any) -> Any:
        def run(array: Any) -> list[Any]:
            started = broadcast_async(tensor_copy(array), root_rank, name, process_set)
            return [array_of(synchronize(started), array.dtype)]

        (found,) = host_call(run, [value], [tf.TensorSpec(value.shape, value.dtype)])

        def gradient(upstream: Any) -> Any:
            (mean,) = _allreduce([upstream], Average, None, 1.0, 1.0, process_set)
            return mean if world.rank() == root_rank else tf.zeros_like(mean)

        return found, gradient

    return sent(tf.convert_to_tensor(tensor))


@not_converted
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Send the root rank's variables to all ranks, in place; return their values.

    Raises:
        HorovodInternalError: as in `broadcast`.
        ValueError: as in `broadcast`.
    """
    found = []
    for i, variable in enumerate(variables):
        each = None if name is None else f"{name}.{i}"
        value = broadcast(variable, root_rank, each, process_set=process_set)
        variable.assign(value)
        found.append(value)
    return found


# All-to-all.


@not_converted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks.

    Args:
        tensor: At least one dimension. The first may differ between ranks, the others
            must not.
        splits: Rows to send to each rank, in rank order, a row of integers; None means
            equal parts. Rows beyond their sum are not sent.
        name: Unique among operations of this kind that are under way.
        ignore_name_scope: Has no effect.
        process_set: The participating ranks; all of them must call this.

    Returns:
        The received rows, in rank order. If ``splits`` is given, a pair: the rows, and
        the number from each rank, with the dtype of ``splits``.

    Raises:
        ValueError: the tensor is a scalar, ``splits`` is not one whole number >= 0 per
            rank or adds up to more rows than there are, or the rows can't be divided
            equally without ``splits``.
        HorovodInternalError: ranks have different dtypes or dimensions, or a rank is
            lost.
    """
    del ignore_name_scope
    size = len(world.current().member(process_set).ranks)
    given = splits is not None
    counts = tf.convert_to_tensor(splits if given else tf.constant([], tf.int32))

    @tf.custom_gradient
    def exchanged(value: Any) -> Any:
        def run(array: Any, parts: Any) -> list[Any]:
            started = alltoall_async(
                tensor_copy(array),
                parts.tolist() if parts.size else None,
                name,
                process_set,
            )
            rows, received = synchronize(started)
            return [
                array_of(rows, array.dtype),
                received.numpy().astype(parts.dtype),
            ]

        specs = [
            tf.TensorSpec(_open_rows(value), value.dtype),
            tf.TensorSpec((size,), counts.dtype),
        ]
        found, received = host_call(run, [value, counts], specs)

        def gradient(upstream: Any, *_: Any) -> Any:
            back, _ = alltoall(upstream, received, process_set=process_set)
            rows = tf.shape(value)[0] - tf.shape(back)[0]  # rows that were not sent
            shape = tf.concat([[rows], tf.shape(back)[1:]], 0)
            return tf.concat([back, tf.zeros(shape, back.dtype)], 0)

        return (found, received), gradient

    found, received = exchanged(tf.convert_to_tensor(tensor))
    return (found, received) if given else found


# Reduce-scatter.


@not_converted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: FBT001, FBT002
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and return this rank's rows.

    The first dimension is divided among ranks; earlier ranks get one more row if it
    does not divide. The gradient is the joined gradients of the ranks, for `Sum` times
    the number of ranks: Horovod's convention.

    Raises:
        HorovodInternalError: ranks have different tensors, the tensor is a scalar, or a
            rank is lost.
        NotImplementedError: ``op`` is `Adasum`.
        ValueError: the dtype is not supported, or this rank is not in the set; at a
            gradient, ``op`` is neither `Average` nor `Sum`.
    """
    del device_dense, ignore_name_scope
    sent, context = compression.compress(tf.convert_to_tensor(tensor))
    (found,) = _reducescatter(
        [sent], op, name, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(found, context)


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Run `reducescatter` for tensors that start together, and fail together.

    Raises:
        HorovodInternalError: as in `reducescatter`.
        NotImplementedError: as in `reducescatter`.
        ValueError: as in `reducescatter`.
    """
    del device_dense
    if not tensors:
        return list(tensors)
    pairs = [compression.compress(t) for t in _tensors(tensors)]
    found = _reducescatter(
        [sent for sent, _ in pairs],
        op,
        None,
        process_set,
        prescale_factor,
        postscale_factor,
    )
    return [
        compression.decompress(value, context)
        for value, (_, context) in zip(found, pairs, strict=True)
    ]


def _reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> list[Any]:
    op = ReduceOp(op)
    require_no_adasum(op, "a reduce-scatter")

    @tf.custom_gradient
    def reduced(*values: Any) -> Any:
        def start(copies: Any) -> Any:
            return grouped_reducescatter_async(
                copies, name, op, process_set, prescale_factor, postscale_factor
            )

        found = _call(start, values, [_open_rows(v) for v in values])

        def gradient(*upstream: Any) -> Any:
            if op not in (Average, Sum):
                raise ValueError(
                    f"a reduce-scatter with op={op.name} has no gradient: use Average "
                    "or Sum, or tf.stop_gradient on its input"
                )
            factor = prescale_factor * postscale_factor
            if op == Sum:
                factor *= process_set.size() or 1
            scaled = [g * tf.cast(factor, g.dtype) for g in upstream]
            joined = grouped_allgather(scaled, process_set=process_set)
            return joined[0] if len(joined) == 1 else joined

        return found, gradient

    return list(reduced(*_tensors(tensors)))


# Ranks as tensors, read when a graph executes.


def _number(read: Callable[[], int], name: str | None) -> Any:
    (found,) = host_call(
        lambda: [np.int32(read())], [], [tf.TensorSpec((), tf.int32, name)]
    )
    return found


@not_converted
def rank_op(name: str | None = None) -> Any:
    """Return this process's rank, an int32 scalar."""
    return _number(world.rank, name)


@not_converted
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank on its host, an int32 scalar."""
    return _number(world.local_rank, name)


@not_converted
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, an int32 scalar."""
    return _number(world.local_size, name)


@not_converted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks in a process set, an int32 scalar.

    Raises:
        ValueError: there is no such set.
    """
    return _number(lambda: len(world.current().ranks_of(process_set_id)), name)


@not_converted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is in a process set and 0 if not, an int32 scalar.

    Raises:
        ValueError: there is no such set.
    """
    return _number(
        lambda: world.rank() in world.current().ranks_of(process_set_id), name
    )
