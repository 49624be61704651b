"""Ranks that die without a plan, while plans change, and with the store they hold."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.errors import PlanMismatch, StrettoError
from stretto.runtime import DistributedDataParallel, ddp
from stretto.runtime.lanes import LanePool
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TorchDDP = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.Linear(512, 4))


def plan_for(ranks: int, lanes: int) -> Plan:
    names = reversed_names(net())
    return plan_in_turn((names[:2], names[2:]), ranks=ranks, lanes=lanes, slices=2)


def step(model: Any, rank: int, number: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * rank + number)
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def ending(function: Any) -> tuple[str, str, float]:
    """The error's type and text, and how long it took to come, in seconds."""
    began_s = time.perf_counter()
    try:
        function()
    except Exception as exc:  # noqa: BLE001
        return type(exc).__name__, str(exc), time.perf_counter() - began_s
    return "", "", time.perf_counter() - began_s


def rank_of_an_unplanned_death(rank: int, size: int, when: str) -> list[Any]:
    module = net()
    model = DistributedDataParallel(module)
    step(model, rank)
    if rank == 1:
        if when == "backward":
            module[2].weight.register_hook(lambda _g: os._exit(9))
            step(model, rank)
        os._exit(9)
    first = ending(lambda: [step(model, rank) for _ in range(3)])
    # Asked again, the model says the same at once.
    again = ending(lambda: step(model, rank))
    if rank == 0:
        time.sleep(8.0)  # it holds the store, which the others still ask
    return [first, again]


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_without_a_plan_a_dead_rank_is_named_too(ranks: Any, when: str) -> None:
    found = ranks(rank_of_an_unplanned_death, 3, when, errors=True, group_s=600)
    assert found[1] is None
    for rank in (0, 2):
        (kind, text, took_s), again = found[rank]
        assert kind == "CommTimeout", text
        assert text.startswith(f"rank {rank}: ")
        # A rank in DDP's broadcast of buffers is stuck until rank 0, which holds the
        # store, ends too. Which of the two ended first can then be unknown.
        assert re.search(
            r"ranks? (0, )?1 (is|are) gone|not heard from: ranks? (0, )?1 ", text
        )
        assert took_s < 60
        assert again[:2] == (kind, text)


def rank_of_a_death_in_replanning(rank: int, size: int, when: str) -> list[Any]:
    model = DistributedDataParallel(net(), plan=plan_for(size, 1), timeout_s=5)
    before = model.plan
    step(model, rank)
    if rank == 1 and when == "before":
        os._exit(9)
    if rank == 1 and when == "while lanes open":
        LanePool.open = lambda *_: os._exit(9)  # type: ignore[method-assign]
    if rank == 1 and when == "before all agree":
        ddp.require_plan_applied = lambda *_: os._exit(9)  # type: ignore[attr-defined]
    found = ending(lambda: model.apply_plan(plan_for(size, 3)))
    if rank == 0:
        time.sleep(8.0)  # it holds the store, which the others still ask
    return [*found, model.plan is before]


@pytest.mark.parametrize("when", ["before", "while lanes open", "before all agree"])
def test_a_rank_that_dies_while_plans_change_leaves_no_half_applied_plan(
    ranks: Any, when: str
) -> None:
    found = ranks(rank_of_a_death_in_replanning, 3, when, errors=True, group_s=600)
    assert found[1] is None
    for rank in (0, 2):
        kind, text, took_s, kept = found[rank]
        assert kind == "CommTimeout", text
        assert "rank 1" in text
        assert kept
        assert took_s < 60


def rank_that_can_not_open_a_lane(rank: int, size: int) -> dict[str, Any]:
    expected = [step(stock := TorchDDP(net()), rank, 0), step(stock, rank, 1)]
    model = DistributedDataParallel(net(), plan=plan_for(size, 1), timeout_s=20)
    before = model.plan
    found: dict[str, Any] = {}
    same = [
        torch.equal(a, b)
        for a, b in zip(step(model, rank, 0), expected[0], strict=True)
    ]
    opened = LanePool.open

    def refuse(pool: LanePool, *needs: Any) -> Any:
        lanes = opened(pool, *needs)
        if rank == 1:
            raise PlanMismatch("no descriptors are left here")
        return lanes

    LanePool.open = refuse  # type: ignore[method-assign]
    found["told"] = ending(lambda: model.apply_plan(plan_for(size, 3)))[:2]
    LanePool.open = opened  # type: ignore[method-assign]
    found["kept"] = model.plan is before
    same += [
        torch.equal(a, b)
        for a, b in zip(step(model, rank, 1), expected[1], strict=True)
    ]
    found["same"] = all(same)
    model.apply_plan(plan_for(size, 3))
    step(model, rank)
    found["later"] = model.plan == plan_for(size, 3)
    return found


def test_one_ranks_trouble_with_a_plan_keeps_it_from_all(ranks: Any) -> None:
    for rank, found in enumerate(ranks(rank_that_can_not_open_a_lane, 2)):
        kind, text = found["told"]
        assert "no descriptors are left here" in text
        assert kind == ("PlanMismatch" if rank == 1 else "RankDisagreement")
        assert found["kept"]
        assert found["same"]
        assert found["later"]


def rank_that_agrees_without_a_store(rank: int, size: int) -> tuple[str, str, float]:
    model = DistributedDataParallel(net(), plan=plan_for(size, 1), timeout_s=20)
    step(model, rank)
    if rank == 0:
        time.sleep(1.0)  # the others wait for it in the agreement by now
        os._exit(9)
    return ending(lambda: model.apply_plan(plan_for(size, 2)))


def test_a_store_that_dies_while_ranks_agree_is_reported(ranks: Any) -> None:
    found = ranks(rank_that_agrees_without_a_store, 3, errors=True, group_s=600)
    for kind, text, took_s in found[1:]:
        assert kind == "CommTimeout", text
        assert "can't apply a plan: the store" in text
        assert "rank 0 is gone" in text
        assert took_s < 60


def rank_of_another_version(rank: int, size: int) -> list[tuple[str, str]]:
    from stretto.runtime import agreement as meeting

    found = []
    for name in ("stretto", "torch"):
        own = (meeting.__version__, torch.__version__)
        if rank == 1:
            if name == "stretto":
                meeting.__version__ = "0.0.1"
            else:
                torch.__version__ = "1.0"
        found.append(ending(lambda: DistributedDataParallel(net()))[:2])
        meeting.__version__, torch.__version__ = own
    dist.barrier()  # rank 0 holds the store that the other still asks
    return found


def test_other_versions_are_reported_before_the_first_step(ranks: Any) -> None:
    for found in ranks(rank_of_another_version, 2):
        (kind, text), (torch_kind, torch_text) = found
        assert kind == torch_kind == "RankDisagreement"
        assert "different versions of stretto" in text
        assert "rank 1 reported 0.0.1" in text
        assert "different versions of PyTorch" in torch_text
        assert "rank 1 reported 1.0" in torch_text


def test_errors_that_ddp_raises_as_runtime_errors_are_such() -> None:
    from stretto.errors import CommTimeout, RankDisagreement

    for kind in (CommTimeout, RankDisagreement):
        assert issubclass(kind, RuntimeError)
        assert issubclass(kind, StrettoError)
