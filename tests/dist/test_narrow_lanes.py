"""Random plans that mix types on the wire, resources, lanes and slices against DDP."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan
from support.nets import Given
from support.plans import plan_of_buckets

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TorchDDP = nn.parallel.DistributedDataParallel

SIZES = (1, 5, 257, 1024, 64, 300, 33, 2)
STEPS = 6


def random_plan(rng: random.Random, ranks: int) -> Plan:
    """Buckets of random tensors that share few lanes in random ways."""
    names = [f"w.{i}" for i in reversed(range(len(SIZES)))]
    edges = sorted(rng.sample(range(1, len(names)), rng.randint(1, 6)))
    lanes = rng.randint(1, 3)
    return plan_of_buckets(
        ranks=ranks,
        overlap=rng.choice(("backward", "backward", "none")),
        lanes=lanes,
        buckets=tuple(
            Bucket(
                tensors=tuple(names[start:end]),
                lane=rng.randrange(lanes),
                slices=rng.randint(1, 3),
                resource=rng.choice((None, None, 1, 2, 3)),
                algorithm="ring",
                wire_dtype=rng.choice(("float32", "bfloat16", "float16")),
            )
            for start, end in zip((0, *edges), (*edges, len(names)), strict=True)
        ),
    )


def gradients(rank: int, size: int, step: int) -> list[torch.Tensor]:
    """Whole numbers so small that no sum, mean or narrow type rounds them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [
        size * torch.randint(-15, 16, (n,), generator=generator).float() for n in SIZES
    ]


def rank_tries_random_plans(rank: int, size: int, seed: int) -> list[str]:
    theirs = TorchDDP(Given(*SIZES))
    expected = []
    for step in range(STEPS):
        theirs.zero_grad()
        theirs(gradients(rank, size, step)).backward()
        expected.append([p.grad.clone() for p in theirs.parameters()])
    rng = random.Random(seed)
    ours = DistributedDataParallel(Given(*SIZES), plan=random_plan(rng, size))
    wrong = []
    for number in range(12):
        for step in range(STEPS):
            ours.zero_grad()
            ours(gradients(rank, size, step)).backward()
            for want, parameter in zip(expected[step], ours.parameters(), strict=True):
                if not torch.equal(want, parameter.grad):
                    wrong.append(f"plan {number} step {step}: {ours.plan}")
                    break
        ours.apply_plan(random_plan(rng, size))
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_narrow_and_wide_buckets_share_lanes_as_ddp_reduces(
    ranks: Any, size: int
) -> None:
    for wrong in ranks(rank_tries_random_plans, size, 11 + size, timeout_s=150):
        assert wrong == []
