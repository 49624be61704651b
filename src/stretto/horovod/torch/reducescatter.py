"""Reduce-scatter: combine values of all ranks, each rank gets its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import (
    ENGINE_OPS,
    Average,
    ReduceOp,
    Sum,
    require_no_adasum,
)
from stretto.horovod.torch.allgather import allgather, grouped_allgather
from stretto.horovod.torch.compression import Compression, Compressor
from stretto.horovod.torch.submission import (
    Operation,
    OperationRow,
    submit,
    synchronize,
    through,
)
from stretto.runtime.negotiated import CollectiveKind
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Sequence

_KIND = CollectiveKind.REDUCESCATTER


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    *,
    grouped: bool,
) -> Operation:
    require_no_adasum(op, "a reduce-scatter")
    fields = {
        "op": ENGINE_OPS[ReduceOp(op)],
        "prescale": float(prescale_factor),
        "postscale": float(postscale_factor),
    }
    for tensor in tensors:
        if tensor.dim() == 0:
            raise HorovodInternalError(
                "reducescatter needs a first dimension to split tensors along, got a "
                "scalar. Add one with reshape(1)."
            )
    rows = [
        OperationRow(tensor=tensor, shape=tuple(tensor.shape), fields=fields)
        for tensor in tensors
    ]
    return submit(_KIND, rows, name, process_set, grouped=grouped)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Start to reduce a tensor over all ranks, each of which gets its rows.

    Args:
        tensor: At least one dimension, the same shape on every rank. The first one is
            divided among ranks; earlier ranks get one more row if it does not divide.
        name: Unique among operations of this kind that are under way.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; for integers see
            `allreduce_async`.
        process_set: The participating ranks; all of them must call this.
        prescale_factor: Factor on every rank's values before they are combined.
        postscale_factor: Factor on the combined values.

    Raises:
        HorovodInternalError: the tensor is a scalar, or communication has already
            failed.
        NotImplementedError: ``op`` is `Adasum`.
        ValueError: an operation of that name is under way, the dtype is not supported,
            or this rank is not in the set.
    """
    return _start(
        [tensor],
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        grouped=False,
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, return this rank's rows; differentiable.

    The gradient is the concatenated gradients of the ranks, for `Sum` times the number
    of ranks: Horovod's convention, by which a sum's gradient is a sum and an average's
    a mean.

    Raises:
        HorovodInternalError: ranks have different tensors, or a rank is lost.
        ValueError: as in `reducescatter_async`.
    """
    sent, context = compression.compress(tensor)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if sent.requires_grad and torch.is_grad_enabled():
        reduced = through(_Reducescatter, sent, *arguments)
    else:
        reduced = synchronize(reducescatter_async(sent, *arguments))
    return compression.decompress(reduced, context)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Run `reducescatter_async` for tensors that start together, and fail together."""
    return _start(
        tensors,
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        grouped=True,
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run `reducescatter` for tensors that start together, and fail together."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        reduced = through(_GroupedReducescatter, arguments, *sent)
    else:
        reduced = synchronize(grouped_reducescatter_async(sent, *arguments))
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


def _factor(arguments: Any) -> float:
    """Return the factor on a gradient."""
    _, op, process_set, prescale_factor, postscale_factor = arguments
    if op not in (Average, Sum):
        raise RuntimeError(
            f"a reduce-scatter with op={ReduceOp(op).name} has no gradient: use "
            "Average or Sum, or detach() its input"
        )
    factor: float = prescale_factor * postscale_factor
    return factor * process_set.size() if op == Sum else factor


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        reduced: torch.Tensor = synchronize(reducescatter_async(tensor, *arguments))
        return reduced

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = gradients[0] * _factor(ctx.arguments)
        joined = allgather(scaled, process_set=ctx.arguments[2])
        return (joined, *[None] * len(ctx.arguments))


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: Any, *tensors: torch.Tensor) -> Any:
        ctx.arguments = arguments
        return tuple(synchronize(grouped_reducescatter_async(tensors, *arguments)))

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        factor = _factor(ctx.arguments)
        scaled = [gradient * factor for gradient in gradients]
        return (None, *grouped_allgather(scaled, process_set=ctx.arguments[2]))
