"""Training in one process as the members of an elastic job did: the tests' oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.elastic.batches import order_of, share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def replayed(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[tuple[torch.Tensor, int]],
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    history: Sequence[tuple[int, list[int]]],
    steps: int,
    batch: int,
) -> list[dict[int, float]]:
    """Return the mean loss of each member's own samples, by step and member.

    ``history`` has the first step and the members of each membership.
    """
    epoch, done, found = 0, 0, []
    for step in range(steps):
        ids = next(ids for first, ids in reversed(history) if first <= step)
        count = min(batch, len(data) - done)
        order = order_of(len(data), epoch=epoch, seed=0, shuffle=True)
        optimizer.zero_grad()
        losses = {}
        for rank, member in enumerate(ids):
            mine = [order[done + i] for i in share(count, len(ids), rank)]
            inputs = torch.stack([data[i][0] for i in mine])
            targets = torch.tensor([data[i][1] for i in mine])
            loss = loss_of(net, (inputs, targets))
            (loss * len(mine) / count).backward()
            losses[member] = loss.item()
        optimizer.step()
        found.append(losses)
        done += count
        if done >= len(data):
            epoch, done = epoch + 1, 0
    return found
