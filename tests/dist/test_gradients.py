"""Gradients of every plan against PyTorch's DDP."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan, tensors_digest
from support.plans import plan_in_turn, plan_of_buckets, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

TorchDDP = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    """Convolutions with batch norm, a frozen layer and one of another dtype's size."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has no gradient but rounding errors.
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.more = nn.Conv2d(6, 7, 3)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.more(x)).mean((2, 3))
        return self.head(self.frozen(x)) * self.scale


class Branches(nn.Module):
    """Uses one of two branches, by the input's sign."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.head(self.left(x) if left else self.right(x))


def make_plan(
    model: nn.Module,
    *,
    ranks: int,
    cuts: list[int] | None = None,
    lanes: int = 1,
    slices: int = 1,
    overlap: str = "backward",
    order: list[int] | None = None,
) -> Plan:
    """Buckets over the parameters in reverse, cut before the positions ``cuts``."""
    rows = [
        (n, p.numel() * p.element_size(), str(p.dtype).removeprefix("torch."))
        for n, p in model.named_parameters()
        if p.requires_grad
    ][::-1]
    if order is not None:
        rows = [rows[i] for i in order]
    edges = [0, *(cuts or []), len(rows)]
    names = [row[0] for row in rows]
    groups = [names[a:b] for a, b in itertools.pairwise(edges) if b > a]
    return plan_in_turn(
        groups,
        ranks=ranks,
        lanes=lanes,
        slices=slices,
        overlap=overlap,
        workload_digest=tensors_digest(rows),
    )


def plans(model: nn.Module, ranks: int) -> dict[str, Plan]:
    count = sum(p.requires_grad for p in model.parameters())
    rng = random.Random(7)
    found = {
        "one bucket": make_plan(model, ranks=ranks),
        "per tensor": make_plan(model, ranks=ranks, cuts=list(range(1, count))),
        "single": make_plan(model, ranks=ranks, overlap="none"),
        "deferred": make_plan(model, ranks=ranks, cuts=[2, 5], lanes=2, overlap="none"),
    }
    for lanes in range(1, 5):
        cuts = sorted(rng.sample(range(1, count), 3))
        found[f"{lanes} lanes"] = make_plan(
            model, ranks=ranks, cuts=cuts, lanes=lanes, slices=5 - lanes
        )
    # Buckets that no order of readiness gives.
    order = list(range(count))
    rng.shuffle(order)
    found["shuffled"] = make_plan(
        model, ranks=ranks, cuts=[2, 4, 6], lanes=3, slices=2, order=order
    )
    return found


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 1, 8, 8, generator=generator)


def fresh(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def train(model: Any, rank: int, steps: int, micro: int = 1) -> list[Any]:
    """Losses and gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro - 1):
            with model.no_sync():
                model(batch(rank, 100 * step + part)).square().mean().backward()
        loss = model(batch(rank, 100 * step + micro)).square().mean()
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        seen.append((loss.item(), grads))
        optimizer.step()
    return seen


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(left, right, strict=True)
    )


def close(left: list[Any], right: list[Any]) -> float:
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a[1], b[1], strict=True):
            scale = y.norm().item() or 1.0
            worst = max(worst, (x - y).norm().item() / scale)
    return worst


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


def rank_trains_every_plan(rank: int, size: int) -> dict[str, bool]:
    found = {}
    for settings in SETTINGS:
        for micro in (1, 3):
            if micro > 1 and "static_graph" in settings:
                continue  # PyTorch's DDP refuses accumulation there in its first step
            expected = train(TorchDDP(fresh(Net), **settings), rank, 3, micro)
            for name, plan in plans(fresh(Net), size).items():
                model = DistributedDataParallel(fresh(Net), plan=plan, **settings)
                key = f"{name} {settings} micro {micro}"
                found[key] = same(train(model, rank, 3, micro), expected)
    return found


@pytest.mark.filterwarnings("ignore")
def test_gradients_equal_ddps_bit_for_bit_on_two_ranks(ranks: Any) -> None:
    for found in ranks(rank_trains_every_plan, 2, timeout_s=110):
        assert [name for name, equal in found.items() if not equal] == []
        assert len(found) > 50


def rank_of_four(rank: int, size: int) -> dict[str, float]:
    expected = train(TorchDDP(fresh(Net)), rank, 3)
    return {
        name: close(
            train(DistributedDataParallel(fresh(Net), plan=plan), rank, 3), expected
        )
        for name, plan in plans(fresh(Net), size).items()
    }


def test_gradients_equal_ddps_within_rounding_on_four_ranks(ranks: Any) -> None:
    for found in ranks(rank_of_four, 4, timeout_s=110):
        assert {name: worst for name, worst in found.items() if worst > 1e-6} == {}


def rank_takes_branches(rank: int, size: int) -> dict[str, bool]:
    """Parameters unused here and there: on one rank, on all, by turns."""
    names = reversed_names(Branches())
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    plan = plan_in_turn(groups, ranks=size, lanes=2, slices=2)
    seen = []
    for kind in (TorchDDP, DistributedDataParallel):
        more = {} if kind is TorchDDP else {"plan": plan}
        model = kind(fresh(Branches), find_unused_parameters=True, **more)
        grads = []
        for step in range(6):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * rank + step)
            x = torch.randn(5, 4, generator=generator)
            model(x, (step + rank * (step // 3)) % 2 == 0).sum().backward()
            grads.append([p.grad for p in model.parameters()])
        seen.append(grads)
    return {
        f"step {i}": all(
            (a is None) == (b is None) and (a is None or torch.equal(a, b))
            for a, b in zip(left, right, strict=True)
        )
        for i, (left, right) in enumerate(zip(*seen, strict=True))
    }


def rank_has_sparse_gradients(rank: int, size: int) -> bool:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 4, sparse=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x)).sum()

    plan = make_plan(Words(), ranks=size, cuts=[2], lanes=2)
    seen = []
    for kind in (TorchDDP, DistributedDataParallel):
        model = kind(fresh(Words), **({} if kind is TorchDDP else {"plan": plan}))
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([1 + rank, 7, 3 + step])).backward()
        seen.append([p.grad.to_dense() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def rank_has_mixed_types(rank: int, size: int) -> bool:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 6)
            self.high = nn.Linear(6, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x).double()).sum()

    high = Bucket(tensors=("high.bias", "high.weight"), slices=3, wire_dtype="float64")
    low = Bucket(
        tensors=("low.bias", "low.weight"), lane=1, slices=2, wire_dtype="float32"
    )
    plan = plan_of_buckets((high, low), ranks=size, lanes=2)
    seen = []
    for kind in (TorchDDP, DistributedDataParallel):
        model = kind(fresh(Mixed), **({} if kind is TorchDDP else {"plan": plan}))
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * rank + step)
            model(torch.randn(5, 4, generator=generator)).backward()
        seen.append([p.grad for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def rank_is_odd(rank: int, size: int) -> dict[str, Any]:
    return {
        "branches": rank_takes_branches(rank, size),
        "sparse": rank_has_sparse_gradients(rank, size),
        "types": rank_has_mixed_types(rank, size),
    }


@pytest.mark.filterwarnings("ignore")
def test_unused_sparse_and_mixed_parameters_are_as_with_ddp(ranks: Any) -> None:
    for found in ranks(rank_is_odd, 2):
        assert [k for k, ok in found["branches"].items() if not ok] == []
        assert found["sparse"]
        assert found["types"]
