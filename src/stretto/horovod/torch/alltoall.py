"""All-to-all: each rank sends a part of its tensor to every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from stretto.horovod import world
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.torch.submission import (
    Operation,
    OperationRow,
    submit,
    synchronize,
    through,
)
from stretto.runtime.negotiated import CollectiveKind
from stretto.runtime.torch_compat import without_dynamo

_KIND = CollectiveKind.ALLTOALL

Splits = torch.Tensor | Sequence[int] | None


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Start to exchange parts of tensors; `synchronize` returns a pair.

    The pair is the received rows, in rank order, and an integer tensor with the number
    of rows from each rank.

    Args:
        tensor: At least one dimension. The first may differ between ranks, the others
            must not.
        splits: Rows to send to each rank, in rank order; ``None`` means equal parts.
            Rows beyond their sum are not sent.
        name: Unique among operations of this kind that are under way.
        process_set: The participating ranks; all of them must call this.

    Raises:
        ValueError: the tensor is a scalar, ``splits`` is not one whole number >= 0 per
            rank or adds up to more rows than there are, the rows can't be divided
            equally without ``splits``, an operation of that name is under way, the
            dtype is not supported, or this rank is not in the set.
        HorovodInternalError: communication has already failed.
    """
    if tensor.dim() == 0:
        raise ValueError(
            "alltoall needs a first dimension to split a tensor along, got a scalar. "
            "Add one with reshape(1)."
        )
    size = len(world.current().member(process_set).ranks)
    parts = _parts(splits, tensor.shape[0], size)
    row = OperationRow(
        tensor=tensor[: sum(parts)],
        shape=tuple(tensor.shape[1:]),
        fields={"splits": parts},
    )
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0).int()
    return submit(_KIND, [row], name, process_set, grouped=False, splits_like=like)


def _parts(splits: Splits, rows: int, size: int) -> tuple[int, ...]:
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"alltoall: the first dimension, {rows}, can't be split equally among "
                f"{size} ranks. Pass splits=."
            )
        return (rows // size,) * size
    if isinstance(splits, torch.Tensor):
        if splits.is_floating_point() or splits.is_complex() or splits.dim() != 1:
            raise ValueError(
                "alltoall: splits must be a row of whole numbers, got "
                f"{splits.dtype} of shape {list(splits.shape)}"
            )
        splits = splits.tolist()
    try:
        parts = tuple(operator.index(part) for part in splits)
    except TypeError as exc:
        raise ValueError(f"alltoall: splits must be whole numbers: {exc}") from exc
    if len(parts) != size or min(parts) < 0 or sum(parts) > rows:
        raise ValueError(
            f"alltoall: splits must be {size} numbers >= 0, one for each rank, that "
            f"add up to at most the first dimension, {rows}; got {list(parts)}"
        )
    return parts


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks; differentiable.

    Returns:
        The received rows, in rank order. If ``splits`` is given, a pair: the rows, and
        the number from each rank, with the dtype and device of ``splits``.

    Raises:
        HorovodInternalError: ranks have different types or other dimensions, or a rank
            is lost.
        ValueError: as in `alltoall_async`.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        received, counts = through(_Alltoall, tensor, splits, name, process_set)
    else:
        received, counts = synchronize(
            alltoall_async(tensor, splits, name, process_set)
        )
    return received if splits is None else (received, counts)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: Splits,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        received, counts = synchronize(
            alltoall_async(tensor, splits, name, process_set)
        )
        ctx.counts = counts.tolist()
        ctx.rows = tensor.shape[0]
        ctx.process_set = process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back, _ = alltoall(gradients[0], splits=ctx.counts, process_set=ctx.process_set)
        kept = ctx.rows - back.shape[0]
        if kept:  # rows that were not sent
            back = torch.cat([back, back.new_zeros(kept, *back.shape[1:])])
        return back, None, None, None
