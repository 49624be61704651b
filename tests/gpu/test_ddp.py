"""Plans on NCCL against PyTorch's DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import PlanMismatch
from stretto.runtime import DistributedDataParallel, Recorder
from stretto.schema import Bucket, Plan
from support.nets import mlp
from support.plans import plan_of_buckets

DEVICE = torch.device("cuda", 0)
TorchDDP = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    return mlp(64, 512, 512, 8, between=nn.Tanh, seed=4).to(DEVICE)


def plan(size: int, *, overlap: str, resources: tuple[int | None, ...]) -> Plan:
    """Three buckets on two lanes, cut into one to three slices."""
    tensors = [("4.bias", "4.weight"), ("2.bias", "2.weight"), ("0.bias", "0.weight")]
    buckets = (
        Bucket(
            tensors=names,
            lane=i % 2,
            slices=i + 1,
            resource=resources[i % 2],
            wire_dtype="float32",
        )
        for i, names in enumerate(tensors)
    )
    return plan_of_buckets(buckets, ranks=size, lanes=2, overlap=overlap)


def plans(size: int) -> list[Plan]:
    return [
        plan(size, overlap="backward", resources=(None, None)),
        plan(size, overlap="backward", resources=(2, 4)),
        plan(size, overlap="none", resources=(4, 4)),
    ]


def train(model: nn.Module, rank: int, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator(DEVICE).manual_seed(10 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 64, device=DEVICE, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def rank_trains(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reference = TorchDDP(net(), device_ids=[0])
    wanted = train(reference, rank, 12)
    for i, each in enumerate(plans(size)):
        for observed in (False, True):
            recorder = Recorder(device=DEVICE) if observed else None
            model = DistributedDataParallel(
                net(), device_ids=[0], plan=each, record=recorder
            )
            losses = train(model, rank, 12)
            equal = all(map(torch.equal, losses, wanted))
            same = all(
                torch.equal(p, q)
                for p, q in zip(model.parameters(), reference.parameters(), strict=True)
            )
            found[f"plan {i}, {'observed' if observed else 'alone'}"] = equal and same
    model = DistributedDataParallel(net(), device_ids=[0], plan=plans(size)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator(DEVICE).manual_seed(10 + rank)
    losses = []
    for step in range(12):
        if step % 3 == 2:
            model.apply_plan(plans(size)[step % len(plans(size))])
        x = torch.randn(32, 64, device=DEVICE, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found["replanned"] = all(map(torch.equal, losses, wanted))
    return found


def test_every_plan_trains_as_ddp_bit_for_bit_on_two_ranks(gpu_ranks: Any) -> None:
    for found in gpu_ranks(rank_trains, 2):
        assert found == dict.fromkeys(found, True)


def rank_asks_too_much(rank: int, size: int) -> dict[str, str]:
    found = {}
    for name, resources in {"ctas": (200, 200), "override": (2, 2)}.items():
        try:
            DistributedDataParallel(
                net(),
                device_ids=[0],
                plan=plan(size, overlap="backward", resources=resources),
            )
            found[name] = "no error"
        except PlanMismatch as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_too_many_ctas_and_variables_that_override_are_refused(gpu_ranks: Any) -> None:
    (found, other) = gpu_ranks(rank_asks_too_much, 2, NCCL_MAX_CTAS="8")
    for each in (found, other):
        assert each["override"].startswith("PlanMismatch")
        assert "NCCL_MAX_CTAS=8" in each["override"]
    (found, other) = gpu_ranks(rank_asks_too_much, 2)
    for each in (found, other):
        assert "400 CTAs" in each["ctas"]
        assert each["override"] == "no error"


def rank_asks_for_levels(rank: int, size: int) -> str:
    bucket = Bucket(
        tensors=tuple(name for name, _ in net().named_parameters())[::-1],
        lane=0,
        slices=1,
        resource=None,
        algorithm="hierarchical",
        wire_dtype="float32",
    )
    try:
        DistributedDataParallel(
            net(), device_ids=[0], plan=plan_of_buckets([bucket], ranks=size)
        )
    except PlanMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("group", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_two_levels_are_refused_with_tensors_on_a_device(
    gpu_ranks: Any, group: str
) -> None:
    for found in gpu_ranks(rank_asks_for_levels, 2, group=group):
        print(found)
        assert "do not support algorithm 'hierarchical' of bucket 0" in found
