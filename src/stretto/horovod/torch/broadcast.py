"""Broadcast: one rank's tensor on every rank."""

from __future__ import annotations

from typing import Any

import torch

from stretto.horovod import world
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average
from stretto.horovod.torch.allreduce import allreduce
from stretto.horovod.torch.submission import (
    Operation,
    OperationRow,
    submit,
    synchronize,
    through,
)
from stretto.runtime.negotiated import CollectiveKind
from stretto.runtime.torch_compat import without_dynamo

_KIND = CollectiveKind.BROADCAST


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Operation:
    member = world.current().member(process_set)
    if root_rank not in member.ranks:
        raise ValueError(
            f"broadcast: root_rank must be a global rank of the process set, one of "
            f"{list(member.ranks)}, got {root_rank}"
        )
    row = OperationRow(
        tensor=tensor,
        output=output,
        shape=tuple(tensor.shape),
        fields={"root": member.ranks.index(root_rank)},
    )
    return submit(_KIND, [row], name, process_set, grouped=False)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Start to send a tensor from one rank; `synchronize` returns the result.

    Args:
        tensor: Any shape and type, the same on every rank.
        root_rank: The global rank whose values are sent.
        name: Unique among operations of this kind that are under way.
        process_set: The participating ranks; all of them must call this.

    Raises:
        ValueError: ``root_rank`` or this rank is not in the set, an operation of that
            name is under way, or the dtype is not supported.
        HorovodInternalError: communication has already failed.
    """
    return _start(tensor, None, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor; differentiable.

    The root's gradient is the mean of all ranks' gradients, the others' is zero, as in
    Horovod since 0.20.

    Raises:
        HorovodInternalError: ranks have different tensors or roots, or a rank is lost.
        ValueError: as in `broadcast_async`.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        sent: torch.Tensor = through(_Broadcast, tensor, root_rank, name, process_set)
        return sent
    waited: torch.Tensor = synchronize(
        broadcast_async(tensor, root_rank, name, process_set)
    )
    return waited


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Run `broadcast_async` in place."""
    return _start(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Run `broadcast` in place; not differentiable."""
    sent: torch.Tensor = synchronize(
        broadcast_async_(tensor, root_rank, name, process_set)
    )
    return sent


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        sent: torch.Tensor = synchronize(
            broadcast_async(tensor, root_rank, name, process_set)
        )
        return sent

    @staticmethod
    @without_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mean = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        if world.rank() != ctx.root_rank:
            mean = mean * 0
        return mean, None, None, None
