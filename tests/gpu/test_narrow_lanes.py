"""Narrow types on the wire on NCCL, against DDP and the closed form."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel, Recorder
from stretto.schema import Bucket
from support.nets import Given
from support.plans import plan_of_buckets

if TYPE_CHECKING:
    from stretto.schema import Plan

DEVICE = torch.device("cuda", 0)
TorchDDP = nn.parallel.DistributedDataParallel
SIZES = (1, 5, 257, 1024, 64, 300, 33, 70000)
WIRES = ("float32", "bfloat16", "float16")
STEPS = 4


def random_plan(rng: random.Random, ranks: int) -> Plan:
    """Buckets of random tensors that share few lanes in random ways."""
    names = [f"w.{i}" for i in reversed(range(len(SIZES)))]
    edges = sorted(rng.sample(range(1, len(names)), rng.randint(1, 6)))
    lanes = rng.randint(1, 3)
    buckets = [
        Bucket(
            tensors=tuple(names[start:end]),
            lane=rng.randrange(lanes),
            slices=rng.randint(1, 3),
            resource=rng.choice((None, None, 1, 2)),
            wire_dtype=rng.choice(WIRES),
        )
        for start, end in zip((0, *edges), (*edges, len(names)), strict=True)
    ]
    overlap = rng.choice(("backward", "backward", "none"))
    return plan_of_buckets(buckets, ranks=ranks, lanes=lanes, overlap=overlap)


def whole(rank: int, size: int, step: int) -> list[torch.Tensor]:
    """Whole numbers so small that no sum, mean or narrow type rounds them."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    rows = [torch.randint(-15, 16, (n,), generator=draw) for n in SIZES]
    return [(size * row).float().to(DEVICE) for row in rows]


def real(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7000 * rank + step)
    return [torch.randn(n, generator=draw).to(DEVICE) for n in SIZES]


def mean(wire: str, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The mean of two ranks, rounded once in each direction."""
    dtype = getattr(torch, wire)
    total = ours.to(dtype).float() + theirs.to(dtype).float()
    return (total / 2).to(dtype).float()


def churn() -> None:
    """Take and fill memory that was freed a moment ago."""
    for _ in range(3):
        torch.full((300_000,), float("nan"), device=DEVICE)


def gradients(model: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    model(given).backward()
    churn()
    return [p.grad.clone() for p in model.parameters()]


def rank_of_whole_numbers(rank: int, size: int) -> list[str]:
    theirs = TorchDDP(Given(*SIZES).to(DEVICE), device_ids=[0])
    expected = [gradients(theirs, whole(rank, size, step)) for step in range(STEPS)]
    rng = random.Random(21 + size)
    wrong = []
    for number in range(8):
        plan = random_plan(rng, size)
        ours = DistributedDataParallel(
            Given(*SIZES).to(DEVICE),
            device_ids=[0],
            plan=plan,
            record=Recorder(device=DEVICE) if number % 4 == 3 else None,
        )
        for change in range(2):
            for step in range(STEPS):
                found = gradients(ours, whole(rank, size, step))
                if not all(map(torch.equal, found, expected[step])):
                    wrong.append(f"plan {number}.{change} step {step}: {ours.plan}")
            ours.apply_plan(random_plan(rng, size))
        del ours
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_narrow_and_wide_buckets_share_lanes_as_ddp_reduces(
    gpu_ranks: Any, size: int
) -> None:
    assert gpu_ranks(rank_of_whole_numbers, size) == [[]] * size


def rank_of_real_numbers(rank: int, size: int) -> list[str]:
    rng, wrong = random.Random(5), []
    for number in range(6):
        plan = random_plan(rng, size)
        wires = {name: b.wire_dtype for b in plan.buckets for name in b.tensors}
        stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            model = DistributedDataParallel(
                Given(*SIZES).to(DEVICE), device_ids=[0], plan=plan
            )
            for step in range(STEPS):
                found = gradients(model, real(rank, step))
                pairs = zip(real(0, step), real(1, step), strict=True)
                for i, (first, second) in enumerate(pairs):
                    wanted = mean(wires[f"w.{i}"], first, second)
                    if not torch.equal(found[i], wanted):
                        off = float((found[i] - wanted).abs().max())
                        wrong.append(f"plan {number} step {step} w.{i}: {off}")
        torch.cuda.synchronize()
    return wrong


def test_gradients_are_rounded_once_in_each_direction(gpu_ranks: Any) -> None:
    assert gpu_ranks(rank_of_real_numbers, 2) == [[], []]


def rank_scales(rank: int, size: int) -> dict[str, Any]:
    """A GradScaler finds what a narrow wire makes infinite, and trains on."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)
    bucket = Bucket(
        tensors=("2.bias", "2.weight", "0.bias", "0.weight"),
        lane=0,
        slices=2,
        resource=None,
        wire_dtype="float16",
    )
    plan = plan_of_buckets([bucket], ranks=size)
    model = DistributedDataParallel(module, device_ids=[0], plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    for step in range(20):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(16, 32, generator=draw).to(DEVICE)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"scale": scaler.get_scale(), "values": values.cpu()}


def test_infinity_passes_a_narrow_wire(gpu_ranks: Any) -> None:
    first, second = gpu_ranks(rank_scales, 2)
    assert first["scale"] == second["scale"] < 2.0**30
    assert bool(first["values"].isfinite().all())
    assert torch.equal(first["values"], second["values"])
