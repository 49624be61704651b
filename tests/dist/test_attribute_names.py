"""Subclasses and scripts whose own names are those of our class, against DDP."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from support.checks import Lines
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

STEPS = 12

NAMES = ("plan", "backend", "observed", "lane", "observe")


def agent(kind: Any) -> Any:
    """Return a subclass whose methods have our names."""

    class Agent(kind):  # type: ignore[misc]
        def plan(self, inputs: torch.Tensor) -> Any:
            return self(inputs)

        def observe(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * inputs

    return Agent(mlp(8, 9, 2, seed=3))


def with_attributes(kind: Any) -> Any:
    model = kind(mlp(8, 9, 2, seed=3))
    for name in NAMES:
        setattr(model, name, f"the script's {name}")
    return model


def losses(model: Any, rank: int) -> list[float]:
    own = not isinstance(model.plan, str)
    draw = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(4, 8, generator=draw)
        out = model.plan(model.observe(inputs)) if own else model(inputs)
        model.zero_grad()
        out.square().mean().backward()
        found.append(sum(float(p.grad.sum()) for p in model.parameters()))
    return found


def trains(rank: int, _size: int) -> dict[str, Any]:
    lines = Lines(logging.WARNING)
    theirs = nn.parallel.DistributedDataParallel
    found: dict[str, Any] = {}
    for make in (agent, with_attributes):
        expected = losses(make(theirs), rank)
        model = make(stretto.DistributedDataParallel)
        same = losses(model, rank) == expected
        planned = model.__dict__["_plan"] is not None
        found[make.__name__] = (same, planned, list(lines.lines))
    kept = [getattr(model, name) for name in NAMES]
    found["kept"] = kept == [f"the script's {name}" for name in NAMES]
    return found


def test_names_of_a_program_s_own_change_nothing(ranks: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, "forced")
    same = (True, True, [])
    expected = {"agent": same, "with_attributes": same, "kept": True}
    assert ranks(trains, 2, timeout_s=100.0) == [expected] * 2
