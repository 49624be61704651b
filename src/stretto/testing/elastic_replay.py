"""One process that trains as the members of an elastic job did: its oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from stretto.elastic.batches import BatchSize, order_of, share, step_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.elastic.training import Membership


def replay_memberships(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    history: Sequence[Membership],
    steps: int,
    batch: str,
    seed: int = 0,
    shuffle: bool = True,
    collate: Callable[[list[Any]], Any] = default_collate,
    on_epoch: Callable[[], object] = lambda: None,
) -> list[dict[int, float]]:
    """Train in this process with the samples that each member of a job had.

    The model and the optimizer end as those of the job, and the losses are its losses,
    within rounding: sums are in another order.

    Args:
        model: as the job's before its first step; trained in place. BatchNorm's running
            values are those of rank 0, as DDP's.
        optimizer: of the model's parameters, as the job's.
        dataset: the job's.
        loss_of: the mean loss of a batch.
        history: the job's memberships: `Elastic.history` of any rank at the end.
        steps: how many steps the job has committed: `Elastic.steps`.
        batch: as `Elastic`'s.
        seed: as `Elastic`'s.
        shuffle: as in `Elastic.batches`.
        collate: makes a batch of samples, as the loader's ``collate_fn``.
        on_epoch: called after each epoch, for instance a scheduler's ``step``.

    Returns:
        By step, the mean loss of each member's own samples, by its id; without members
        that had no sample in the step.

    Raises:
        SpecError: ``batch`` is invalid.
    """
    size = BatchSize.of(batch)
    epoch, done = 0, 0
    found: list[dict[int, float]] = []
    for step in range(steps):
        ids = next(m.ids for m in reversed(history) if m.first_step <= step)
        order = order_of(len(dataset), epoch=epoch, seed=seed, shuffle=shuffle)
        samples = min(size.of_step(len(ids)), len(dataset) - done)
        optimizer.zero_grad()
        before = [b.detach().clone() for b in model.buffers()]
        of_first = before
        losses: dict[int, float] = {}
        for rank, member in enumerate(ids):
            mine = [order[done + i] for i in share(samples, len(ids), rank)]
            if not mine:
                continue
            _restore(model, before)
            torch.manual_seed(step_seed(seed, step=step, rank=rank))
            loss = loss_of(model, collate([dataset[i] for i in mine]))
            (loss * len(mine) / samples).backward()
            losses[member] = loss.item()
            if rank == 0:
                of_first = [b.detach().clone() for b in model.buffers()]
        _restore(model, of_first)
        optimizer.step()
        found.append(losses)
        done += samples
        if done >= len(dataset):
            epoch, done = epoch + 1, 0
            on_epoch()
    return found


def _restore(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)
