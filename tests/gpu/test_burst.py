"""Burst training on a device, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import stretto
from stretto.burst.executor import BurstParallel
from support.burst_ranks import (
    make_data,
    make_model,
    part,
    random_plan,
    shares_of,
    worst,
    worst_grad,
)

DEVICE = torch.device("cuda", 0)
KINDS = ("vgg11", "transformer", "wide resnet", "inception")


def compared(kind: str, rank: int, size: int, seed: int) -> float:
    """The largest relative difference of gradients and state, in float64."""
    integers = kind == "transformer"
    reference = make_model(kind).double().to(DEVICE)
    model = copy.deepcopy(reference)
    draw = [
        (x.to(DEVICE) if integers else x.double().to(DEVICE), y.to(DEVICE))
        for x, y in (make_data(kind, 6, step) for step in range(4))
    ]
    example = draw[0][0][:2]
    plan = random_plan(model, example, size, seed)
    burst = BurstParallel(model, plan, example_inputs=(example,))
    counts = shares_of(6, size, "uneven")
    loss_of = torch.nn.functional.cross_entropy
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9)
        for m in (burst, reference)
    ]
    off = 0.0
    for x, y in draw:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(burst(part(x, counts, rank)), part(y, counts, rank)).backward()
        loss_of(reference(x), y).backward()
        off = max(off, worst_grad(burst.module, reference))
        for optimizer in optimizers:
            optimizer.step()
    state = burst.full_state_dict()
    return max(
        off,
        *(
            worst(state[name].double(), value.double())
            for name, value in reference.state_dict().items()
        ),
    )


def rank_compares(rank: int, size: int, kind: str) -> list[float]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    return [compared(kind, rank, size, seed) for seed in (1, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_state_is_that_of_one_process(
    gpu_ranks: Any, kind: str, group: str
) -> None:
    for found in gpu_ranks(rank_compares, 2, kind, group=group):
        assert max(found) < 1e-9, found


class Annealed(torch.nn.Module):
    """Draws noise, and scales by an attribute that the program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(16, 3)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.first(x)))
        out: torch.Tensor = self.last(x) / self.temperature
        return out


def rank_anneals(rank: int, size: int) -> list[float]:
    """The relative difference of the losses' gradients, per step."""
    torch.manual_seed(3)
    reference = Annealed().double().to(DEVICE)
    reference.drop.p = 0.0
    model = copy.deepcopy(reference)
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(6, 8, generator=draw, dtype=torch.float64).to(DEVICE)
    plan = random_plan(model, x[:2], size, 1)
    burst = BurstParallel(model, plan, example_inputs=(x[:2],))
    counts = shares_of(6, size, "uneven")
    off = []
    for step in range(24):
        for one in (burst.module, reference):
            one.temperature = 1.0 if step < 18 else 1.0 + step
        burst.zero_grad()
        reference.zero_grad()
        burst(part(x, counts, rank)).square().mean().backward()
        reference(x).square().mean().backward()
        off.append(worst_grad(burst.module, reference))
    return off


def test_a_temperature_changed_late_is_followed(gpu_ranks: Any) -> None:
    for found in gpu_ranks(rank_anneals, 2):
        assert max(found) < 1e-9, found


def rank_profiles(rank: int, size: int) -> dict[str, Any]:
    """The whole chain: profile, plan, train one step, measure, plan again."""
    model = make_model("vgg16").to(DEVICE)
    x, y = (each.to(DEVICE) for each in make_data("vgg16", 4, rank))
    layers = stretto.profile_layers(model, (x[:2],), gpus=size, batch=4 * size)
    plan = stretto.plan_layers(layers, gpus=size, batch=4 * size)
    burst = stretto.BurstParallel(model, plan, example_inputs=(x[:2],))
    for _ in range(4):
        torch.nn.functional.cross_entropy(burst(x), y).backward()
    again = stretto.plan_layers(
        layers, gpus=size, batch=4 * size, measured=burst.measured()
    )
    times = [row.forward_s for row in layers.layers for row in row.times]
    return {"layers": len(again.layers), "times": times[:8]}


def test_a_profile_becomes_a_plan_and_is_measured(gpu_ranks: Any) -> None:
    for found in gpu_ranks(rank_profiles, 2):
        assert found["layers"] > 1  # short ones are joined
        assert min(found["times"]) > 0
