"""Models whose forward runs backward itself, under ``plan="auto"``, against DDP.

Lightning's manual optimization does this: it prepares the Reducer before each backward,
and keeps DDP from doing so at the end of forward.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from stretto.tune import TuneOptions

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

STEPS = 24


class Manual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor, wrapped: list[Any]) -> torch.Tensor:
        for number, model in enumerate(wrapped):
            loss = self.net(x + number).square().mean()
            model.reducer.prepare_for_backward([])
            loss.backward()
            model.require_backward_grad_sync = False
        return self.net(x).square().mean()


BACKWARDS = {
    "one": lambda _step: 1,
    "two": lambda step: 2 if step else 1,  # DDP fails with two in the first step
    "in some steps": lambda step: step % 3,
}
"""The number of backwards within the forward of each step."""


def train(model: Any, rank: int, backwards: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        count = backwards(step)
        loss = model(torch.randn(4, 6, generator=generator), [model] * count)
        model.require_backward_grad_sync = True
        if not count:
            loss.backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found


def trains(rank: int, _size: int) -> dict[str, tuple[bool, bool, list[str]]]:
    lines: list[str] = []
    log = logging.getLogger("stretto")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    found = {}
    for name, backwards in BACKWARDS.items():
        theirs = train(nn.parallel.DistributedDataParallel(Manual()), rank, backwards)
        options = TuneOptions(steps=6, watch=False, plan_cache=False)
        model = stretto.DistributedDataParallel(Manual(), tune=options)
        reducer = model.reducer
        ours = train(model, rank, backwards)
        same = all(map(torch.equal, ours, theirs))
        errors = [line for line in lines if "Error:" in line]
        changed = model.reducer is not reducer
        found[name] = (same, changed, errors)
        lines.clear()
    return found


@pytest.mark.parametrize("schedule", ["forced", ""])
def test_gradients_are_those_of_ddp_and_tuning_continues(
    ranks: Any, monkeypatch: Any, schedule: str
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, schedule)
    expected = {name: (True, True, []) for name in BACKWARDS}
    assert ranks(trains, 2, timeout_s=300.0, group_s=120.0) == [expected] * 2
