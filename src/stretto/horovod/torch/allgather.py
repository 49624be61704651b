"""All-gather: tensors of all ranks concatenated, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.torch.alltoall import alltoall
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

_KIND = CollectiveKind.ALLGATHER


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> Operation:
    rows = []
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(
                "allgather needs a first dimension to join tensors along, got a "
                "scalar. Add one with reshape(1)."
            )
        rows.append(
            OperationRow(
                tensor=tensor,
                shape=tuple(tensor.shape[1:]),
                fields={"rows": tensor.shape[0]},
            )
        )
    return submit(_KIND, rows, name, process_set, grouped=grouped)


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Start to concatenate tensors of all ranks; `synchronize` returns the result.

    Args:
        tensor: At least one dimension. The first may differ between ranks, the others
            must not.
        name: Unique among operations of this kind that are under way.
        process_set: The participating ranks; all of them must call this.

    Raises:
        ValueError: the tensor is a scalar, an operation of that name is under way, the
            dtype is not supported, or this rank is not in the set.
        HorovodInternalError: communication has already failed.
    """
    return _start([tensor], name, process_set, grouped=False)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Concatenate tensors of all ranks along the first dimension; differentiable.

    The gradient is the mean over ranks of the gradients of this rank's rows, as in
    Horovod since 0.20, where each rank's loss is one of ``size`` that are averaged.

    Raises:
        HorovodInternalError: ranks have different types or other dimensions, or a rank
            is lost.
        ValueError: as in `allgather_async`.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        gathered: torch.Tensor = through(_Allgather, tensor, name, process_set)
        return gathered
    waited: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
    return waited


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Run `allgather_async` for tensors that start together, and fail together."""
    return _start(tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run `allgather` for tensors that start together, and fail together."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(through(_GroupedAllgather, name, process_set, *tensors))
    gathered: list[torch.Tensor] = synchronize(
        grouped_allgather_async(tensors, name, process_set)
    )
    return gathered


def _own_gradient(
    gradient: torch.Tensor, rows: tuple[int, ...], process_set: ProcessSet
) -> torch.Tensor:
    """Return the mean over ranks of the gradients of this rank's rows.

    Each rank gets its rows from every other rank and adds them up: a reduce-scatter of
    uneven parts, with half the bytes of an all-reduce.
    """
    received = alltoall(gradient, splits=list(rows), process_set=process_set)[0]
    size = len(rows)
    own = received.shape[0] // size
    mean: torch.Tensor = received.reshape(size, own, *gradient.shape[1:]).sum(0) / size
    return mean


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        operation = allgather_async(tensor, name, process_set)
        gathered: torch.Tensor = synchronize(operation)
        ctx.rows = operation.received_rows[0]
        ctx.process_set = process_set
        return gathered

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _own_gradient(gradients[0], ctx.rows, ctx.process_set), None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        operation = grouped_allgather_async(tensors, name, process_set)
        gathered = tuple(synchronize(operation))
        ctx.rows = operation.received_rows
        ctx.process_set = process_set
        return gathered

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        own = [
            _own_gradient(gradient, rows, ctx.process_set)
            for gradient, rows in zip(gradients, ctx.rows, strict=True)
        ]
        return (None, None, *own)
