"""Compiled steps and models while plans change below them, against DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from stretto.tune import TuneOptions
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TorchDDP = nn.parallel.DistributedDataParallel


def batches(rank: int, steps: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=draw) for _ in range(steps)]


def whole_step(kind: Any, rank: int) -> list[float]:
    """Compile forward, backward and optimizer as one function."""
    model = kind(mlp(8, 9, 2, seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @torch.compile(backend="eager")
    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [step(inputs).item() for inputs in batches(rank, 12)]


def without_recompiling(kind: Any, rank: int) -> list[float]:
    """Compile the wrapped model, and forbid later on that it is compiled again."""
    model = kind(mlp(8, 9, 2, seed=3))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    try:
        for number, inputs in enumerate(batches(rank, 40)):
            if number == 3:  # DDP has rebuilt its buckets
                torch.compiler.set_stance("fail_on_recompile")
            optimizer.zero_grad()
            loss = compiled(inputs).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    finally:
        torch.compiler.set_stance("default")
    return found


def with_changing_sizes(kind: Any, rank: int) -> list[int]:
    """Count the calls of compiled code and the compilations as batch sizes change."""
    calls, compilations = [0], [0]

    def backend(graph: Any, _inputs: Any) -> Any:
        compilations[0] += 1

        def run(*args: Any) -> Any:
            calls[0] += 1
            return graph.forward(*args)

        return run

    model = kind(torch.compile(mlp(8, 9, 2, seed=3), backend=backend))
    draw = torch.Generator().manual_seed(rank)
    found = []
    for size in (4, 4, 5, 6, 4, 7, 5, 8, 9, 4, 5, 3, 2, 4):
        model(torch.randn(size, 8, generator=draw)).square().mean().backward()
        found += [calls[0], compilations[0]]
    return found


def compiles(rank: int, _size: int, name: str) -> bool:
    def ours(module: nn.Module) -> Any:
        options = TuneOptions(steps=6, watch=False, plan_cache=False)
        return stretto.DistributedDataParallel(module, tune=options)

    train = {
        "step": whole_step,
        "model": without_recompiling,
        "sizes": with_changing_sizes,
    }[name]
    expected = train(TorchDDP, rank)
    torch._dynamo.reset()
    return train(ours, rank) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_compiled_as_a_whole_trains_as_with_ddp(
    ranks: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, "forced")
    assert ranks(compiles, 2, "step", timeout_s=200.0) == [True, True]


@pytest.mark.filterwarnings("ignore")
def test_tuning_compiles_nothing_again(ranks: Any) -> None:
    assert ranks(compiles, 2, "model", timeout_s=200.0) == [True, True]


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compiled_as_often_as_with_ddp_while_steps_are_measured(
    ranks: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, "forced")
    assert ranks(compiles, 2, "sizes", timeout_s=200.0) == [True, True]
