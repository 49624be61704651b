"""Copies, pickles and compiled models, with a plan, as DDP allows them."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stretto.runtime import DistributedDataParallel
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def fresh() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def plan_of(ranks: int) -> Plan:
    names = reversed_names(Net())
    groups = [names[:5], names[5:9], names[9:]]
    return plan_in_turn(groups, ranks=ranks, lanes=3, slices=2)


def train(model: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def buckets_in_use(model: Any) -> list[tuple[str, ...]]:
    return [schedule.tensors for schedule in model._planned.schedules]


def rank_copies(rank: int, size: int) -> dict[str, bool]:
    found = {}
    plan = plan_of(size)
    wanted = [bucket.tensors for bucket in plan.buckets]
    stock = TorchDDP(fresh())
    ours = DistributedDataParallel(fresh(), plan=plan)
    # One rank copies for itself, as for an average of the weights, and uses it alone.
    if rank == 0:
        alone = copy.deepcopy(ours).eval()
        alone(torch.randn(2, 6))
        with torch.no_grad():
            alone.train()(torch.randn(2, 6))
        alone(torch.randn(2, 6))  # in training too, a forward needs no other rank
    expected = train(stock, rank)
    found["original after a copy on one rank"] = same(train(ours, rank), expected)
    another = DistributedDataParallel(fresh(), plan=plan)
    found["a later model after it"] = same(train(another, rank), expected)
    copied = copy.deepcopy(ours)
    found["a copy has the plan"] = copied.plan == plan and copied.module is not None
    expected = train(copy.deepcopy(stock), rank)
    found["copy"] = same(train(copied, rank), expected)
    found["copy's buckets"] = buckets_in_use(copied) == wanted
    found["copy of an untrained copy"] = same(
        train(copy.deepcopy(copy.deepcopy(ours)), rank), expected
    )
    loaded = pickle.loads(pickle.dumps(ours))
    found["pickle"] = same(train(loaded, rank), expected)
    found["pickle's buckets"] = buckets_in_use(loaded) == wanted
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    found["saved"] = same(train(again, rank), expected)
    # The state of either fits the other.
    stock.load_state_dict(ours.state_dict())
    back = DistributedDataParallel(fresh(), plan=plan)
    back.load_state_dict(stock.state_dict())
    found["state"] = same(train(back, rank), train(stock, rank))
    found["observed"] = all(model.plan == plan for model in (copied, loaded, again))
    return found


@pytest.mark.filterwarnings("ignore")
def test_copies_carry_the_plan_on_and_train_as_ddps_do(ranks: Any) -> None:
    for found in ranks(rank_copies, 2, timeout_s=120, group_s=120.0):
        assert [name for name, kept in found.items() if not kept] == []


def rank_compiles(rank: int, size: int) -> dict[str, Any]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("stretto").addHandler(Keep())

    def blocks() -> nn.Module:
        module = fresh()
        for block in module.blocks:
            block.compile(backend="aot_eager")
        return module

    plan = plan_of(size)
    found: dict[str, Any] = {}
    expected = train(TorchDDP(blocks()), rank)
    found["blocks"] = same(
        train(DistributedDataParallel(blocks(), plan=plan), rank), expected
    )
    found["lines for blocks"] = len(lines)

    def whole(kind: Any, **settings: Any) -> Any:
        return torch.compile(kind(fresh(), **settings), backend="aot_eager")

    expected = train(whole(TorchDDP), rank)
    found["around"] = same(
        train(whole(DistributedDataParallel, plan=plan), rank), expected
    )
    found["lines for around"] = [x for x in lines if "whole model is compiled" in x]
    lines.clear()
    module = fresh()
    module.compile(backend="aot_eager")
    found["within"] = same(
        train(DistributedDataParallel(module, plan=plan), rank), expected
    )
    found["lines for within"] = [x for x in lines if "whole model is compiled" in x]
    return found


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_train_as_with_ddp_and_whole_ones_are_logged(
    ranks: Any,
) -> None:
    for rank, found in enumerate(ranks(rank_compiles, 2, timeout_s=170, group_s=120.0)):
        assert found["blocks"]
        assert found["around"]
        assert found["within"]
        assert found["lines for blocks"] == 0
        wanted = 1 if rank == 0 else 0
        assert len(found["lines for within"]) == wanted
        assert len(found["lines for around"]) == wanted


def rank_that_copies_after_freezing(rank: int, size: int) -> list[Any]:
    found = []
    for cls, extra in (
        (TorchDDP, {}),
        (DistributedDataParallel, {"plan": plan_of(size)}),
    ):
        model = cls(fresh(), find_unused_parameters=True, **extra)
        train(model, rank, steps=1)
        model.module.blocks[0].requires_grad_(False)
        twin = copy.deepcopy(model)
        found.append(train(twin, rank, steps=2))
    return found


def test_a_copy_that_trains_other_parameters_keeps_ddps_buckets(ranks: Any) -> None:
    for theirs, ours in ranks(rank_that_copies_after_freezing, 2):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
