"""All-reduce: values of all ranks combined, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import (
    ENGINE_OPS,
    ReduceOp,
    reduction_of,
    require_no_adasum,
)
from stretto.horovod.torch.compression import Compression, Compressor
from stretto.horovod.torch.submission import (
    Operation,
    OperationRow,
    submit,
    synchronize,
    through,
)
from stretto.runtime.negotiated import CollectiveKind
from stretto.runtime.reduction_rounds import SEQUENCE
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Sequence

_KIND = CollectiveKind.ALLREDUCE


def _start(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor | None],
    average: bool | None,  # noqa: FBT001
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    grouped: bool,
    sequence: str = "",
) -> Operation:
    reduction = reduction_of(op, average)
    require_no_adasum(reduction, "an all-reduce")
    fields = {
        "op": ENGINE_OPS[reduction],
        "prescale": float(prescale_factor),
        "postscale": float(postscale_factor),
        "sequence": sequence,
    }
    rows = [
        OperationRow(
            tensor=tensor, output=output, shape=tuple(tensor.shape), fields=fields
        )
        for tensor, output in zip(tensors, outputs, strict=True)
    ]
    return submit(_KIND, rows, name, process_set, grouped=grouped)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Start to reduce a tensor over all ranks; `synchronize` returns the result.

    Ranks match operations by ``name``; unnamed operations are numbered in call order.
    Shape, type, device and reduction must be the same on every rank. The tensor must
    not change before the operation has ended.

    Args:
        tensor: Any shape; dense.
        average: Older form of ``op``: true is `Average`, false `Sum`.
        name: Unique among operations of this kind that are under way.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`. Averages of
            integers truncate toward zero. A sum beyond the type's range wraps
            around, also within an average: convert int8 and uint8 to a wider type
            first.
        prescale_factor: Factor on every rank's values before they are combined.
            Integers are scaled in float64, float16 on the CPU in float32.
        postscale_factor: Factor on the combined values.
        process_set: The participating ranks; all of them must call this.

    Raises:
        ValueError: both ``op`` and ``average`` are given, an operation of that name is
            under way, the dtype is not supported, or this rank is not in the set.
        NotImplementedError: ``op`` is `Adasum`.
        HorovodInternalError: communication has already failed.
    """
    return _start(
        [tensor],
        [None],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=False,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; differentiable.

    Arguments are as in `allreduce_async`; ``compression`` is applied on the wire.

    Raises:
        HorovodInternalError: ranks have different tensors, or a rank is lost.
        ValueError: as in `allreduce_async`.
    """
    sent, context = compression.compress(tensor)
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if sent.requires_grad and torch.is_grad_enabled():
        reduced = through(_Allreduce, sent, *arguments)
    else:
        reduced = synchronize(allreduce_async(sent, *arguments))
    return compression.decompress(reduced, context)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Run `allreduce_async` in place."""
    return _start(
        [tensor],
        [tensor],
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=False,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Run `allreduce` in place; not differentiable."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = synchronize(allreduce_async_(tensor, *arguments))
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Run `allreduce_async` for tensors that start together, and fail together.

    `synchronize` returns a list. ``name`` is the group's.
    """
    return _start(
        tensors,
        [None] * len(tensors),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run `allreduce` for tensors that start together, and fail together."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        reduced = through(_GroupedAllreduce, arguments, *sent)
    else:
        reduced = synchronize(grouped_allreduce_async(sent, *arguments))
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Run `grouped_allreduce_async` in place."""
    return _start(
        tensors,
        tensors,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped=True,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run `grouped_allreduce` in place; not differentiable."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: list[torch.Tensor] = synchronize(
        grouped_allreduce_async_(tensors, *arguments)
    )
    return reduced


def reduced_in_sequence(
    tensors: Sequence[torch.Tensor], name: str, op: ReduceOp
) -> list[torch.Tensor]:
    """Run `grouped_allreduce` as one of the reductions of `Rounds`.

    Raises:
        HorovodInternalError: another rank reduces other tensors, or is lost.
    """
    outputs = [None] * len(tensors)
    arguments = (None, name, op, 1.0, 1.0, global_process_set)
    reduced: list[torch.Tensor] = synchronize(
        _start(tensors, outputs, *arguments, grouped=True, sequence=SEQUENCE)
    )
    return reduced


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        reduced: torch.Tensor = synchronize(allreduce_async(tensor, *arguments))
        return reduced

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        average, _, op, prescale, postscale, process_set = ctx.arguments
        reduced = allreduce(
            gradients[0],
            op=reduction_of(op, average),
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return (reduced, *[None] * len(ctx.arguments))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: Any, *tensors: torch.Tensor) -> Any:
        ctx.arguments = arguments
        return tuple(synchronize(grouped_allreduce_async(tensors, *arguments)))

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        average, _, op, prescale, postscale, process_set = ctx.arguments
        reduced = grouped_allreduce(
            gradients,
            op=reduction_of(op, average),
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return (None, *reduced)
