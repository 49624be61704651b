"""Parameters that are unused by turns, against PyTorch's DDP."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan
from stretto.tune import TuneOptions
from stretto.tune.initial_profile import deferred_plan
from support.checks import differing_steps
from support.plans import plan_of_buckets
from support.steady_network import use_steady_network

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

TorchDDP = nn.parallel.DistributedDataParallel

BRANCHES = 7


class Gated(nn.Module):
    """Sums those of its branches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 5) for _ in range(BRANCHES))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        total = torch.stack([self.branches[i](x) for i in used]).sum(0)
        return self.head(torch.tanh(total))


def net() -> Gated:
    torch.manual_seed(2)
    return Gated()


def used_in(rank: int, step: int, micro: int) -> list[int]:
    """Return a random part of the branches; some are unused on all ranks for long."""
    rng = random.Random(f"{rank} {step} {micro}")
    open_to_all = [i for i in range(BRANCHES) if i != step // 5 % BRANCHES]
    return sorted(rng.sample(open_to_all, rng.randint(1, len(open_to_all))))


def train(
    model: Any,
    rank: int,
    steps: int,
    *,
    to_none: bool,
    micro: int,
    settled: list[Any] | None = None,
) -> list[Any]:
    """Gradients of every step, missing ones as ``None``.

    With `settled`, stop once something is in it.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(micro):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(4, 6, generator=generator)
            with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
                model(x, used_in(rank, step, part)).square().mean().backward()
        seen.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
        optimizer.step()
        if settled:
            break
    return seen


def random_plan(rng: random.Random, ranks: int) -> Plan:
    names = [name for name, _ in Gated().named_parameters()]
    rng.shuffle(names)
    lanes = rng.randint(1, 3)
    edges = sorted(rng.sample(range(1, len(names)), rng.randint(1, 5)))
    return plan_of_buckets(
        ranks=ranks,
        overlap=rng.choice(("backward", "none")),
        lanes=lanes,
        buckets=tuple(
            Bucket(
                tensors=tuple(names[start:end]),
                lane=rng.randrange(lanes),
                slices=rng.randint(1, 3),
                wire_dtype="float32",
            )
            for start, end in zip((0, *edges), (*edges, len(names)), strict=True)
        ),
    )


CASES: list[dict[str, Any]] = [
    {"to_none": True, "micro": 1},
    {"to_none": False, "micro": 1},
    {"to_none": True, "micro": 3},
]


def rank_uses_parts(rank: int, size: int) -> list[str]:
    wrong = []
    rng = random.Random(4)
    for views in (False, True):
        settings = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        for case in CASES:
            expected = train(TorchDDP(net(), **settings), rank, 12, **case)
            first = DistributedDataParallel(net(), **settings)
            plans = {f"plan {i}": random_plan(rng, size) for i in range(2)}
            for name, plan in {**plans, "deferred": deferred_plan(first)}.items():
                model = DistributedDataParallel(net(), plan=plan, **settings)
                steps = differing_steps(train(model, rank, 12, **case), expected)
                wrong += [f"{name}, {settings}, {case}, step {s}" for s in steps]
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_plans_treat_unused_parameters_as_ddp_does(ranks: Any) -> None:
    for wrong in ranks(rank_uses_parts, 2, timeout_s=200, group_s=120.0):
        assert wrong == []


MAX_STEPS = 2000
"""Tuning has settled by then; steps last milliseconds."""


def rank_tunes(rank: int, size: int) -> list[dict[str, Any]]:
    use_steady_network()
    found = []
    for case in CASES:
        settings = {"find_unused_parameters": True}
        settled: list[Any] = []
        model = stretto.DDP(
            net(),
            on_settled=settled.append,
            tune=TuneOptions(steps=12, lost_ratio=100.0, watch=False, plan_cache=False),
            **settings,
        )
        ours = train(model, rank, MAX_STEPS, settled=settled, **case)
        expected = train(TorchDDP(net(), **settings), rank, len(ours), **case)
        found.append(
            {
                "wrong": differing_steps(ours, expected),
                "settled": len(settled),
                "tensors": [len(s.workload.tensors) for s in settled],
            }
        )
    return found


@pytest.mark.filterwarnings("ignore")
def test_models_with_unused_parameters_are_tuned(ranks: Any) -> None:
    count = len(list(net().parameters()))
    for found in ranks(rank_tunes, 2, timeout_s=200, group_s=120.0):
        for one in found:
            assert one == {"wrong": [], "settled": 1, "tensors": [count]}
