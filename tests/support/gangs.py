"""A small training for gangs, and the same in one process."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

COUNT, SAMPLES = 7, 4


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
    )


def data_of(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + index)
    return (
        torch.randn(SAMPLES, 6, generator=draw),
        torch.randint(0, 3, (SAMPLES,), generator=draw),
    )


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    x, y = data_of(step, index)
    return nn.functional.cross_entropy(model(x), y)


def train(gang: Any, model: nn.Module, steps: int, slow_s: float = 0.0) -> list[int]:
    """Return how many micro-batches this rank computed in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    found = []
    for step in range(steps):
        own = 0
        for index in gang.claims():
            loss_of(model, step, index).backward()
            time.sleep(slow_s)
            own += 1
        gang.reduce()
        optimizer.step()
        found.append(own)
    return found


def say_claimed(step: int) -> None:
    """Let the ranks in `wait_for_claim` continue: this rank holds a micro-batch."""
    dist.distributed_c10d._get_default_store().set(f"claimed in {step}", b"")


def wait_for_claim(step: int) -> None:
    """Wait before a step's claims, so that another rank surely gets a micro-batch."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"claimed in {step}"], timedelta(seconds=60.0))


def alone(steps: int, seed: int = 3) -> list[torch.Tensor]:
    """Train in one process with the gradients of all micro-batches."""
    from stretto.gang.gang import Gang

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    seeds = Gang.__new__(Gang)
    seeds._seed = seed
    for step in range(steps):
        optimizer.zero_grad()
        seeds.step = step
        for index in range(COUNT):
            torch.manual_seed(seeds._seed_of(index))
            (loss_of(model, step, index) / COUNT).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def difference(model: nn.Module, steps: int) -> float:
    """The largest difference from the parameters of one process."""
    return max(
        float((p - want).abs().max())
        for p, want in zip(model.parameters(), alone(steps), strict=True)
    )
