"""Ranks that disagree, die or stall: every other rank ends with one clear message."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import PlanMismatch, RankDisagreement, StrettoError
from stretto.runtime import DistributedDataParallel
from stretto.schema import Plan, tensors_digest
from support.checks import raised
from support.nets import mlp
from support.plans import plan_in_turn, reversed_names
from support.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def net(width: int = 16) -> nn.Module:
    return mlp(8, width, 4, between=nn.ReLU, seed=0)


def plan_for(
    model: nn.Module, ranks: int, *, lanes: int = 1, cut: int = 2, **bucket: Any
) -> Plan:
    rows = [
        (n, p.numel() * p.element_size(), "float32")
        for n, p in model.named_parameters()
    ][::-1]
    names = [row[0] for row in rows]
    return plan_in_turn(
        (names[:cut], names[cut:]),
        ranks=ranks,
        lanes=lanes,
        workload_digest=tensors_digest(rows),
        **bucket,
    )


def rank_disagrees(rank: int, size: int) -> dict[str, tuple[str, str]]:
    make = DistributedDataParallel
    model = net()
    plan = plan_for(model, size)
    found = {}
    found["plans"] = raised(
        make, model, plan=plan if rank else plan_for(model, size, lanes=2)
    )
    found["plan or none"] = raised(make, model, plan=plan if rank else None)
    wide = net(16 + rank)
    found["models"] = raised(make, wide)
    found["models and plans"] = raised(make, wide, plan=plan_for(wide, size))
    found["another model"] = raised(make, net(32), plan=plan)
    found["one rank's model"] = raised(
        make, net(), plan=plan_for(net(32) if rank else net(), size)
    )
    found["names"] = raised(make, nn.Sequential(nn.Linear(8, 4)), plan=plan)
    built = make(model, plan=plan, timeout_s=3)
    found["apply"] = raised(
        built.apply_plan, plan_for(model, size, slices=2) if rank else None
    )
    found["build or apply"] = (
        raised(built.apply_plan, plan) if rank else raised(make, model, timeout_s=3)
    )
    # What failed has changed nothing.
    assert built.plan is plan
    return found


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory: Any, rank_servers: Any) -> Any:
    """Return what each of two ranks raised that disagreed."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    return ranks(rank_disagrees, 2)


@pytest.mark.parametrize(
    "case", ["plans", "plan or none", "models", "models and plans", "apply"]
)
def test_disagreeing_ranks_all_report_both_values(disagreeing: Any, case: str) -> None:
    for found in disagreeing:
        kind, text = found[case]
        assert kind == "RankDisagreement", (case, text)
        assert "rank 0 reported" in text
        assert "rank 1 reported" in text


def test_ranks_with_different_plans_get_one_text_with_digests(disagreeing: Any) -> None:
    assert disagreeing[0]["plans"] == disagreeing[1]["plans"]
    assert "sha256:" in disagreeing[0]["plans"][1]
    assert all("no plan" in found["plan or none"][1] for found in disagreeing)


def test_a_plan_of_another_model_is_a_mismatch_on_every_rank(disagreeing: Any) -> None:
    for found in disagreeing:
        assert found["another model"][0] == "PlanMismatch"
        assert "stretto profile" in found["another model"][1]
        assert found["names"][0] == "PlanMismatch"
        assert "'2.bias'" in found["names"][1]


def test_a_model_that_one_rank_alone_builds_is_a_disagreement(disagreeing: Any) -> None:
    assert disagreeing[0]["one rank's model"][0] == "RankDisagreement"


def test_ranks_in_different_calls_name_the_rank_they_waited_for(
    disagreeing: Any,
) -> None:
    for rank, found in enumerate(disagreeing):
        kind, text = found["build or apply"]
        assert kind == "CommTimeout"
        # One may have ended before the other's time is over.
        waited = f"rank {rank} waited 3 s for rank {1 - rank}"
        assert waited in text or f"rank {1 - rank} is gone" in text


def rank_asks_too_much(rank: int, size: int) -> dict[str, tuple[str, str]]:
    model = net()
    make = DistributedDataParallel
    found = {
        "algorithm": raised(make, model, plan=plan_for(model, size, algorithm="tree")),
        "wire": raised(make, model, plan=plan_for(model, size, wire_dtype="float64")),
    }
    mixed = net()
    mixed[0].double()
    names = reversed_names(mixed)
    plan = plan_in_turn([names], ranks=size)
    found["dtypes"] = raised(make, mixed, plan=plan)
    halves = plan_in_turn([names], ranks=size, overlap="halves")
    found["overlap"] = raised(make, model, plan=halves)
    return found


def test_what_can_not_be_executed_is_refused(ranks: Any) -> None:
    (found,) = ranks(rank_asks_too_much, 1)
    for case, word in {
        "algorithm": "'tree'",
        "wire": "'float64'",
        "dtypes": "float32 and float64",
        "overlap": "'halves'",
    }.items():
        assert found[case][0] == "PlanMismatch", case
        assert word in found[case][1]


def rank_of_a_death(rank: int, size: int, when: str) -> tuple[str, str, float]:
    model = net(512)
    lanes = 2
    ddp = DistributedDataParallel(
        model, plan=plan_for(model, size, lanes=lanes, slices=2)
    )
    victim = size - 2
    for step in range(6):
        began_s = time.perf_counter()
        try:
            if rank == victim and step == 3:
                if when == "forward":
                    os._exit(9)
                model[0].weight.register_hook(lambda _g: os._exit(9))
            ddp(torch.randn(4, 8)).sum().backward()
        except Exception as exc:  # noqa: BLE001
            return type(exc).__name__, str(exc), time.perf_counter() - began_s
    return "", "", 0.0


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_dead_rank_is_named_by_every_other(ranks: Any, when: str) -> None:
    found = ranks(rank_of_a_death, 4, when, errors=True, group_s=600)
    assert found[2] is None
    for rank in (0, 1, 3):
        kind, text, took_s = found[rank]
        assert kind == "CommTimeout", text
        assert text.startswith(f"rank {rank}: the all-reduce of bucket ")
        assert "lane" in text
        assert "rank 2 is gone" in text
        assert took_s < 30


def rank_of_the_first_ranks_death(rank: int, size: int) -> tuple[str, str]:
    model = net()
    ddp = DistributedDataParallel(model, plan=plan_for(model, size))
    ddp(torch.randn(4, 8)).sum().backward()
    if rank == 0:
        os._exit(9)
    return raised(lambda: ddp(torch.randn(4, 8)).sum().backward())


def test_the_death_of_the_rank_that_holds_the_store_is_reported(ranks: Any) -> None:
    found = ranks(rank_of_the_first_ranks_death, 3, errors=True, group_s=600)
    for rank in (1, 2):
        kind, text = found[rank]
        assert kind == "CommTimeout"
        assert "rank 0" in text
        assert "gone" in text


def rank_that_stalls(rank: int, size: int) -> tuple[str, str]:
    model = net()
    ddp = DistributedDataParallel(model, plan=plan_for(model, size), timeout_s=3)
    ddp(torch.randn(4, 8)).sum().backward()
    if rank == 1:
        time.sleep(14)
        return "", ""
    return raised(lambda: ddp(torch.randn(4, 8)).sum().backward())


def test_a_wait_ends_at_its_timeout_and_names_who_is_stuck(ranks: Any) -> None:
    kind, text = ranks(rank_that_stalls, 2, group_s=600)[0]
    assert kind == "CommTimeout"
    assert "within 3 s" in text
    assert "rank 1 is late or stuck" in text
    # Both buckets are in flight on the lane: either may be the first to give up.
    assert re.search(r"bucket [01] \(.*\) on lane 0 ", text)


def rank_without_a_gradient(rank: int, size: int) -> tuple[str, str]:
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    ddp = DistributedDataParallel(model, plan=plan_for(model, size))
    try:
        for _ in range(3):
            ddp(torch.randn(4, 8)).sum().backward()
    except RuntimeError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def test_ddps_message_about_unused_parameters_survives(ranks: Any) -> None:
    for kind, text in ranks(rank_without_a_gradient, 2):
        assert kind == "RuntimeError"
        assert "Expected to have finished reduction in the prior iteration" in text
        assert "find_unused_parameters=True" in text


def rank_with_an_error_of_its_own(rank: int, size: int) -> list[bool]:
    """A user's exception in backward; the next step is as with DDP."""

    class Trap(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if Trap.armed:
                raise ValueError("mine")
            return grad

    class Trapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Trap.apply(self.net(x))

    model = Trapped()
    ddp = DistributedDataParallel(model, plan=plan_for(model, size))
    seen = []
    for step in range(3):
        Trap.armed = step == 1
        try:
            ddp(torch.randn(4, 8)).sum().backward()
        except ValueError as exc:
            seen.append(str(exc) == "mine")
    return seen


def test_a_users_exception_in_backward_leaves_the_model_usable(ranks: Any) -> None:
    assert ranks(rank_with_an_error_of_its_own, 2) == [[True], [True]]


def test_errors_are_of_one_tree() -> None:
    assert issubclass(PlanMismatch, StrettoError)
    assert issubclass(RankDisagreement, StrettoError)


def rank_whose_child_holds_its_sockets(rank: int, size: int) -> tuple[str, str, float]:
    model = net()
    model = DistributedDataParallel(
        model, plan=plan_for(model, size, lanes=2), timeout_s=60
    )
    began_s = time.perf_counter()
    for step in range(6):
        if step == 3 and rank == 1:
            if os.fork() == 0:
                time.sleep(25)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.perf_counter()
        kind, text = raised(lambda: model(torch.ones(2, 8)).sum().backward())
        if kind:
            return kind, text, time.perf_counter() - began_s
    return "", "", 0.0


def test_a_dead_rank_is_noticed_though_its_child_keeps_its_sockets(ranks: Any) -> None:
    kind, text, took_s = ranks(
        rank_whose_child_holds_its_sockets, 2, errors=True, group_s=60
    )[0]
    assert kind == "CommTimeout"
    assert "rank 1 is gone" in text
    assert took_s < 20
