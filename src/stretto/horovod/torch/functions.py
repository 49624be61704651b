"""Parameters, optimizer state and objects sent to all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.horovod.torch.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    import torch
    from torch import nn


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Sends parameters from one rank to all, in place."""
    raise NotImplementedError


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None
) -> None:
    """Sends an optimizer's state from one rank to all."""
    raise NotImplementedError


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of the root rank, on every rank."""
    raise NotImplementedError


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, by rank."""
    raise NotImplementedError
