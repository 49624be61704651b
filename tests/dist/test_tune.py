"""Tuning inside a run: every step trains, ranks agree, and nothing can end the job."""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto
from stretto.tune import TuneOptions, controller
from stretto.tune import initial_profile as look
from stretto.tune.drift_detector import REFERENCE_WINDOWS, WINDOW_STEPS
from support.checks import Lines
from support.nets import mlp
from support.plans import plan_in_turn
from support.steady_network import use_steady_network

if TYPE_CHECKING:
    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

MAX_STEPS = 400
"""By then every tuning here has settled, also on a busy machine."""

TorchDDP = nn.parallel.DistributedDataParallel


net = partial(mlp, 64, 400, 400, 4)


class Training:
    """A training whose inputs depend on rank and step alone."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model = model
        self.rank = rank
        self.number = 0
        self.losses: list[float] = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def steps(self, number: int, pause_s: float = 0.02) -> None:
        for _ in range(number):
            generator = torch.Generator().manual_seed(self.number * 10 + self.rank)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(16, 64, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.number += 1
            self.losses.append(float(loss.detach()))
            time.sleep(pause_s)

    def until(self, settled: list[Any], number: int = 1) -> None:
        """Steps until tuning has settled so often; the number of steps may vary."""
        while len(settled) < number and self.number < MAX_STEPS:
            self.steps(1)
        self.steps(3)


def events(settled: Any) -> list[str]:
    return [event.what for event in settled.record.events]


def tuned(
    rank: int, options: TuneOptions, **more: Any
) -> tuple[Training, list[Any], Any]:
    use_steady_network()
    settled: list[Any] = []
    model = stretto.DistributedDataParallel(
        net(), on_settled=settled.append, tune=options, **more
    )
    return Training(model, rank), settled, model


def planned(model: Any, size: int) -> Plan:
    """One bucket on two lanes in two slices."""
    names = [row.name for row in reversed(model.tensor_table())]
    return plan_in_turn([names], ranks=size, lanes=2, slices=2)


def searches(rank: int, size: int, techniques: tuple[str, ...]) -> dict[str, Any]:
    options = TuneOptions(
        steps=30, lost_ratio=5.0, techniques=techniques, watch=False, plan_cache=False
    )
    ours, settled, model = tuned(rank, options)
    ours.until(settled)
    theirs = Training(TorchDDP(net()), rank)
    theirs.steps(ours.number)
    return {
        "same": ours.losses == theirs.losses,
        "settled": len(settled),
        "digest": settled[0].executed.digest,
        "executed": model.plan.digest == settled[0].executed.digest,
        "events": events(settled[0]),
        "tried": {
            e.values["technique"] for e in settled[0].record.events if e.what == "tried"
        },
        "done": model._auto is None,
    }


@pytest.mark.parametrize(
    "techniques",
    [("predicted", "coordinate"), ("grid", "population", "hyperband", "bayes")],
    ids=["guided", "ensemble"],
)
def test_all_steps_of_a_search_are_ddp_s_and_ranks_settle_on_one_plan(
    ranks, techniques
):
    first, second = ranks(searches, 2, techniques, timeout_s=120.0, group_s=120.0)
    assert first["same"]
    assert second["same"]
    assert first["digest"] == second["digest"]
    assert first["executed"]
    assert second["executed"]
    assert first["settled"] == 1
    assert first["done"]
    assert first["events"][:3] == ["started", "profiled", "planned"]
    assert first["events"][-1] == "settled"
    assert "start" in first["tried"]


def looks(rank: int, size: int) -> list[dict[str, Any]]:
    """A look where twice the lanes help and one where they don't."""
    found = []
    look.MAX_SPREAD_RATIO = math.inf  # a busy machine has no longer look here
    for helps in (True, False):
        # Of so small a model's messages a rank may see no time at all.
        look.more_lanes_help = lambda _samples, helps=helps: helps
        ours, settled, _model = tuned(
            rank, TuneOptions(steps=0, watch=False, plan_cache=False)
        )
        ours.until(settled)
        theirs = Training(TorchDDP(net()), rank)
        theirs.steps(ours.number)
        record = settled[0].record.events
        profiled = next(e.step for e in record if e.what == "profiled")
        found.append({"same": ours.losses == theirs.losses, "steps": profiled})
    return found


def test_a_look_opens_more_lanes_only_where_they_help(ranks):
    profiled = controller.WARM_UP_STEPS + look.WARMUP_STEPS + len(look.PROFILE_LANES)
    expected = [
        {"same": True, "steps": profiled + len(look.MORE_LANES)},
        {"same": True, "steps": profiled},
    ]
    assert ranks(looks, 2, timeout_s=90.0, group_s=120.0) == [expected, expected]


def blind(rank: int, size: int) -> Any:
    options = TuneOptions(
        steps=120,
        lost_ratio=1e6,
        patience=None,
        model=False,
        techniques=("grid", "hyperband"),
        watch=False,
        plan_cache=False,
    )
    ours, settled, _model = tuned(rank, options)
    ours.until(settled)
    # Rank 0 searches and logs it.
    tried = [e.values for e in settled[0].record.events if e.what == "tried"]
    return [t["key"] for t in tried], {t["technique"] for t in tried}


def test_a_blind_search_starts_from_ddp_and_its_techniques_propose_the_rest(ranks):
    keys, techniques = ranks(blind, 2, timeout_s=90.0, group_s=120.0)[0]
    assert keys[0] == "ddp"
    assert len(keys) >= 4
    assert techniques - {"final"} == {"start", "grid", "hyperband"}


def remembers(rank: int, size: int, path: str) -> dict[str, Any]:
    os.environ["STRETTO_PLAN_CACHE"] = path
    options = TuneOptions(steps=12, watch=False)
    first, settled, _model = tuned(rank, options)
    first.until(settled)
    again, settled_again, copy = tuned(rank, options)
    plans = []
    for _ in range(16):
        again.steps(1)
        plans.append(None if copy.plan is None else copy.plan.digest)
    changed = stretto.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)), tune=options
    )
    Training(changed, rank).steps(controller.WARM_UP_STEPS)
    profiling = changed.plan.planner
    return {
        "first": events(settled[0]),
        "again": events(settled_again[0] if settled_again else copy._auto),
        "plans": plans,
        "settled": settled[0].executed.digest,
        "same": again.losses == first.losses[:16],
        "changed": profiling,
    }


def test_a_second_run_starts_with_the_settled_plan(ranks, tmp_path):
    path = tmp_path / "plans.sqlite"
    for one in ranks(remembers, 2, str(path), timeout_s=90.0, group_s=120.0):
        assert one["first"][:3] == ["started", "profiled", "planned"]
        assert one["same"]
        # Whatever the noise said of it later, it begins with that plan, as soon as DDP
        # has rebuilt its buckets.
        first = controller.WARM_UP_STEPS - 1
        assert all(plan is None for plan in one["plans"][:first])
        assert one["plans"][first] == one["settled"]
        if "changed" not in one["again"]:
            assert one["again"] == ["started", "remembered", "settled"]
            assert set(one["plans"][first:]) == {one["settled"]}
        assert one["changed"] == "profile"
    assert path.exists()


def breaks(rank: int, size: int, path: str) -> Any:
    os.environ["STRETTO_PLAN_CACHE"] = path
    lines = Lines(logging.WARNING)
    ours, settled, _model = tuned(rank, TuneOptions(steps=8, watch=False))
    ours.until(settled)
    return len(settled), lines.lines


def test_a_broken_memory_costs_one_warning_on_one_rank(ranks, tmp_path):
    path = tmp_path / "plans.sqlite"
    path.write_bytes(b"broken" * 500)
    (first, lines), (second, none) = ranks(
        breaks, 2, str(path), timeout_s=120.0, group_s=120.0
    )
    assert first == second == 1
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert none == []


def refuses(rank: int, size: int) -> dict[str, Any]:
    """Plans with several lanes do not fit into this rank's memory."""
    options = TuneOptions(
        steps=200,
        lost_ratio=1e6,
        model=False,  # without a bound to end it early, the grid comes to several lanes
        techniques=("grid",),
        patience=None,  # noise alone may keep six plans in a row from being faster
        watch=False,
        plan_cache=False,
    )
    ours, settled, model = tuned(rank, options)
    build = model._build_group

    def build_or_fail(module: Any, group: Any, plan: Any) -> Any:
        if rank == 1 and plan.lanes > 1 and plan.planner == "tuned":
            raise torch.OutOfMemoryError("no room for this plan")
        return build(module, group, plan)

    model._build_group = build_or_fail
    ours.until(settled)
    theirs = Training(TorchDDP(net()), rank)
    theirs.steps(ours.number)
    failed = [
        event.why
        for event in settled[0].record.events
        if event.what == "tried" and event.values["step_s"] is None
    ]
    return {"same": ours.losses == theirs.losses, "failed": failed}


def test_a_trial_that_runs_out_of_memory_falls_back_on_every_rank(ranks):
    first, second = ranks(refuses, 2, timeout_s=90.0, group_s=120.0)
    assert first["same"]
    assert second["same"]
    assert first["failed"]
    assert all("no room for this plan" in why for why in first["failed"])


def drifts(rank: int, size: int) -> dict[str, Any]:
    options = TuneOptions(steps=8, plan_cache=False)
    ours, settled, model = tuned(rank, options)
    ours.until(settled)
    ours.steps((REFERENCE_WINDOWS + 1) * WINDOW_STEPS)
    while len(settled) < 2 and ours.number < MAX_STEPS:
        ours.steps(1, pause_s=0.3)
    theirs = Training(TorchDDP(net()), rank)
    theirs.steps(ours.number, pause_s=0.0)
    return {
        "same": ours.losses == theirs.losses,
        "settled": len(settled),
        "events": events(settled[-1]),
        "watched": model._auto is not None,
    }


def test_a_lasting_change_re_opens_the_search_and_it_settles_again(ranks):
    for one in ranks(drifts, 2, timeout_s=120.0, group_s=120.0):
        assert one["same"]
        assert one["settled"] >= 2
        assert "changed" in one["events"]
        assert one["events"].count("profiled") >= 2
        assert one["watched"]


def evaluates(rank: int, size: int) -> dict[str, Any]:
    """Rank 0 evaluates after every third step; one run is shorter than the budget."""
    options = TuneOptions(steps=30, lost_ratio=5.0, watch=False, plan_cache=False)
    ours, settled, _model = tuned(rank, options)
    while not settled and ours.number < MAX_STEPS:
        ours.steps(3)
        if rank == 0:
            with torch.no_grad():
                ours.model(torch.ones(4, 64))
            time.sleep(0.05)
    theirs = Training(TorchDDP(net()), rank)
    theirs.steps(ours.number, pause_s=0.0)
    short, never, _ = tuned(rank, options)
    short.steps(3)
    tried = [e.values for e in settled[0].record.events if e.what == "tried"]
    return {
        "same": ours.losses == theirs.losses,
        "steps": [t["step_s"] for t in tried if t["step_s"]],
        "never": never,
    }


def test_evaluations_in_between_do_not_count_and_a_short_run_just_ends(ranks):
    found = ranks(evaluates, 2, timeout_s=90.0, group_s=120.0)
    for one in found:
        assert one["same"]
        assert one["never"] == []
    assert found[0]["steps"]


def joins(rank: int, size: int) -> dict[str, Any]:
    options = TuneOptions(steps=10, plan_cache=False)
    ours, settled, model = tuned(rank, options)
    before = model.plan
    with model.join():
        ours.steps(4 + 2 * rank)
    during = model.plan is before
    # PyTorch leaves a model marked as joining when the context ends, and so do we.
    ours.number = 6  # equal on both ranks again
    ours.steps(5)
    return {"during": during, "settled": len(settled), "steps": len(ours.losses)}


def test_a_model_with_uneven_inputs_is_not_tuned_and_trains_on(ranks):
    for rank, one in enumerate(ranks(joins, 2, timeout_s=60.0, group_s=120.0)):
        assert one == {"during": True, "settled": 0, "steps": 9 + 2 * rank}


def decides(rank: int, size: int) -> dict[str, Any]:
    """Plans applied by hand in the middle of the look, of the trials, and after."""
    found: dict[str, Any] = {}
    options = TuneOptions(steps=60, lost_ratio=5.0, plan_cache=False)
    for name, steps in (("look", 5), ("trials", 20), ("watch", None)):
        ours, settled, model = tuned(rank, options)
        if steps is None:
            ours.until(settled)
        else:
            ours.steps(steps)
        record = model._auto.record
        mine = planned(model, size)
        model.apply_plan(mine)
        ours.steps(20)
        theirs = Training(TorchDDP(net()), rank)
        theirs.steps(ours.number, pause_s=0)
        found[name] = {
            "was": record.events[-1].what,
            "stays": model.plan.digest == mine.digest,
            "watched": model.observed,
            "ended": model._auto is None,
            "same": ours.losses == theirs.losses,
        }
    return found


def test_a_plan_applied_by_hand_ends_tuning_and_stays(ranks):
    for one in ranks(decides, 2, timeout_s=140, group_s=120.0):
        assert one["watch"]["was"] == "settled"
        for found in one.values():
            assert found["stays"]
            assert found["ended"]
            assert not found["watched"]
            assert found["same"]


def misreads(rank: int, size: int) -> dict[str, Any]:
    """Rank 1's clock began at another time and runs a third faster."""
    if rank == 1:
        for module in (controller, look):
            module.perf_counter = lambda: 1e6 + 1.33 * time.perf_counter()
    options = TuneOptions(steps=20, lost_ratio=5.0, watch=False, plan_cache=False)
    ours, settled, model = tuned(rank, options)
    ours.until(settled)
    theirs = Training(TorchDDP(net()), rank)
    theirs.steps(ours.number, pause_s=0)
    return {
        "same": ours.losses == theirs.losses,
        "plan": model.plan.digest,
        "step_s": settled[0].step_s,
    }


def test_a_rank_whose_clock_is_off_misleads_no_rank(ranks):
    first, second = ranks(misreads, 2, timeout_s=90.0, group_s=120.0)
    assert first == second
    assert first["same"]
    assert 0 < first["step_s"] < 10
