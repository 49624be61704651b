"""Every planner's plan, executed, against PyTorch's DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto import planners
from stretto.demo.tasks import ConvNet, DemoTransformer
from stretto.runtime import DistributedDataParallel
from stretto.schema import (
    AllReduceFit,
    Link,
    Plan,
)
from support.instances import one_link, workload_of_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TorchDDP = nn.parallel.DistributedDataParallel
RUNNABLE = [name for name in planners.NAMES if name != "dear"]
"""The planners whose plans the runtime executes."""


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return ConvNet(16) if kind == "convnet" else DemoTransformer(40, 2, 5)


def batch_of(kind: str, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    if kind == "convnet":
        images = torch.rand(8, 1, 8, 8, generator=generator)
        return images, torch.randint(10, (8,), generator=generator)
    tokens = torch.randint(256, (2, 32), generator=generator)
    return tokens, torch.randint(256, (2, 32), generator=generator)


def plans(kind: str, ranks: int) -> dict[str, Plan]:
    """A plan of each planner for a network whose flows can't fill the link."""
    named = list(model_of(kind).named_parameters())[::-1]
    workload = workload_of_model(named, forward_s=0.004, backward_s=0.001 * len(named))
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=4e7, stream_bytes_per_s=1e7)
    fit = AllReduceFit(startup_s=5e-4, s_per_byte=1e-7, ranks=ranks)
    cluster = one_link(link, hosts=ranks, allreduce=fit)
    return {n: planners.get(n).plan(workload, cluster) for n in RUNNABLE}


def gradients(model: nn.Module, kind: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of three steps; the Reducer rebuilds its buckets in the second."""
    found = []
    for step in range(3):
        inputs, targets = batch_of(kind, rank, step)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        found.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
    return found


def differences(rank: int, size: int, kind: str) -> dict[str, float]:
    """Largest difference from DDP's by planner, relative to a tensor's largest."""
    reference = gradients(TorchDDP(model_of(kind)), kind, rank)
    worst = {}
    for name, plan in plans(kind, size).items():
        ours = gradients(DistributedDataParallel(model_of(kind), plan=plan), kind, rank)
        worst[name] = max(
            float((mine[key] - theirs[key]).abs().max() / theirs[key].abs().max())
            for mine, theirs in zip(ours, reference, strict=True)
            for key in theirs
        )
    return worst


@pytest.mark.parametrize("kind", ["convnet", "transformer"])
def test_on_two_ranks_every_planner_s_gradients_are_ddp_s_bit_for_bit(ranks, kind):
    for found in ranks(differences, 2, kind, timeout_s=120.0):
        assert set(found) == set(RUNNABLE)
        assert found == dict.fromkeys(found, 0.0)


def test_on_four_ranks_they_differ_by_rounding_alone(ranks):
    for found in ranks(differences, 4, "convnet", timeout_s=150.0):
        assert set(found) == set(RUNNABLE)
        assert max(found.values()) <= 1e-6
