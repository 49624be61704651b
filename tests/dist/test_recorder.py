"""Steps of all ranks on one clock: who is late, and nothing left when it is over."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.report.gather import gather
from stretto.report.ranks import find_late
from stretto.runtime import DistributedDataParallel, Recorder
from stretto.runtime.recording.gathering import RecordGathering
from stretto.runtime.recording.merging import merged_timeline
from stretto.runtime.recording.step import AbstractStepObserver
from stretto.runtime.store import ranks_of
from stretto.schema import Bucket, Plan
from stretto.tune.artifacts import RECORDED_STEPS
from support.plans import plan_of_buckets
from support.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.report.ranks import RanksFound
    from stretto.schema import Timeline
    from support.ranks import RankServers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

SLOW_S = 0.08
AHEAD_S = 1234.5


class Slow(nn.Module):
    """Takes a while in forward or in backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 60), nn.Linear(60, 10)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        hidden = self.first(inputs)
        hidden.register_hook(lambda _: time.sleep(self.backward_s))
        return self.second(hidden)


def plan_of(ranks: int) -> Plan:
    second = Bucket(tensors=("second.weight", "second.bias"), wire_dtype="float32")
    first = replace(second, tensors=("first.weight", "first.bias"), lane=1, slices=2)
    return plan_of_buckets((second, first), ranks=ranks, lanes=2)


def train(model: nn.Module, steps: int, before: Any = None) -> None:
    for _ in range(steps):
        if before is not None:
            before()
        model.zero_grad()
        model(torch.ones(4, 40)).sum().backward()


def kept_by_all(rank: int, size: int, folder: str) -> dict[str, Any]:
    os.environ["STRETTO_TRACE"] = f"{folder}/trace.json"
    os.environ["STRETTO_REPORT"] = f"{folder}/report.html"
    torch.manual_seed(0)
    slow_s = SLOW_S if rank == 2 else 0.0
    model = stretto.DistributedDataParallel(Slow(slow_s, 0.0), plan=plan_of(size))
    artifacts = model._artifacts
    assert artifacts is not None
    began_s = time.perf_counter()
    train(model, RECORDED_STEPS + 3)
    trained_s = time.perf_counter() - began_s
    ended = artifacts.wait(40.0)
    for name in ("STRETTO_TRACE", "STRETTO_REPORT"):
        del os.environ[name]
    return {
        "done": artifacts.done and ended,
        "forgotten": model._artifacts is None,
        "trained_s": trained_s,
        **recorded_by_hand(rank, size),
        **calls_when_off(size),
    }


def recorded_by_hand(rank: int, size: int) -> dict[str, Any]:
    """Clocks that differ, a rank slow in backward, and a rank that leaves nothing."""
    if rank == 1:
        real = time.perf_counter
        recording = ("step", "clocks", "gathering")
        ours = ("sender", *(f"recording.{name}" for name in recording))
        for module in [sys.modules[f"stretto.runtime.{name}"] for name in ours]:
            module.perf_counter = lambda: real() + AHEAD_S
    slow_s = SLOW_S if rank == 1 else 0.0
    model = DistributedDataParallel(Slow(0.0, slow_s), plan=plan_of(size))
    found: dict[str, Any] = {}

    def gathered(records: Any, missing: list[int]) -> None:
        rows = {step.number: buckets for step, buckets in recorder.steps}
        found["missing"] = missing
        found["hosts"] = {rank: record.host for rank, record in records.items()}
        found["timeline"] = merged_timeline("by hand", records, rows)
        found["clocks"] = {
            rank: [(p.offset_s, p.bound_s) for p in record.clock.points]
            for rank, record in records.items()
        }

    recorder = Recorder()
    recording = RecordGathering(
        ranks_of(model.process_group, timeout_s=None),
        timeout_s=3.0,
        clock=f"of rank {rank}",
    )
    recording.begin()
    model.observe(recorder)
    train(model, 5)
    model.observe(None)
    if rank != 2:
        recording.finish(lambda: tuple(s for s, _ in recorder.steps), gathered)
    assert recording.wait(30.0)
    dist.barrier()
    return found


class Counting(AbstractStepObserver):
    """Counts what is reported to it."""

    def __init__(self) -> None:
        self.calls = 0

    def _count(self, *_: Any) -> None:
        self.calls += 1

    attached = forward_started = forward_ended = backward_started = _count
    gradient_ready = bucket_launched = slice_finished = _count
    backward_computed = backward_ended = _count


def calls_when_off(size: int) -> dict[str, Any]:
    """Calls of ours in a step's thread: never observed, observed, and no longer."""
    model = DistributedDataParallel(Slow(0.0, 0.0), plan=plan_of(size))
    train(model, 3)
    never = calls_in_a_step(model)
    counting = Counting()
    model.observe(counting)
    train(model, 1)
    counting.calls = 0
    observed = calls_in_a_step(model)
    counts = counting.calls
    model.observe(None)
    train(model, 3)
    off = calls_in_a_step(model)
    hooks = [len(model._forward_hooks), len(model._forward_pre_hooks)] + [
        len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()
    ]
    return {"calls": (never, observed, off), "counts": counts, "hooks": hooks}


def calls_in_a_step(model: nn.Module) -> list[str]:
    names: list[str] = []

    def profile(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and f"{os.sep}stretto{os.sep}" in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        train(model, 1)
    finally:
        sys.setprofile(None)
    return sorted(names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, rank_servers: RankServers, folder: Path
) -> list[dict[str, Any]]:
    """What each rank found; by the environment, rank 2 is slow in forward."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    rows: list[dict[str, Any]] = ranks(kept_by_all, 3, str(folder), timeout_s=90.0)
    return rows


@pytest.fixture
def timeline(found: list[dict[str, Any]], folder: Path) -> Timeline:
    """The timeline of all ranks that the environment asks for."""
    (method,) = gather([folder / "trace.json"]).methods
    assert method.ranks is not None
    assert method.measured is not None
    return method.ranks


def late_of(timeline: Timeline) -> RanksFound:
    shown = find_late(timeline)
    assert shown is not None
    return shown


def test_each_rank_ends_its_recording(found: list[dict[str, Any]]) -> None:
    assert all(row["done"] and row["forgotten"] for row in found)


def test_all_ranks_are_recorded(timeline: Timeline) -> None:
    assert timeline.ranks == (0, 1, 2)
    assert len(late_of(timeline).steps) == RECORDED_STEPS


def test_the_late_rank_and_its_part_are_named(timeline: Timeline) -> None:
    (late,) = late_of(timeline).late
    assert (late.rank, late.part) == (2, "forward")
    assert late.part_s > 0.9 * SLOW_S


def test_the_page_names_the_late_rank(
    found: list[dict[str, Any]], folder: Path
) -> None:
    page = (folder / "report.html").read_text()
    assert "Rank 2 is late" in page
    assert "same clock" in page


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_show_their_waits_for_the_late_one(
    timeline: Timeline, rank: int
) -> None:
    shown = late_of(timeline)
    assert {lane.track for lane in shown.lanes} == {"lane0", "lane1"}
    assert shown.ranks[rank].peer_s > 0.5 * SLOW_S
    spans = timeline.of_rank(rank, step=shown.typical).spans
    assert any(s.name == "waits for rank 2" for s in spans)
    # Which bucket: callbacks of two buckets may come in either order.
    assert any(
        s.track.startswith("lane") and s.name.endswith(" waits for rank 2")
        for s in spans
    )


def test_a_rank_that_leaves_nothing_is_missing(found: list[dict[str, Any]]) -> None:
    assert found[0]["missing"] == [2]
    assert sorted(found[0]["hosts"]) == [0, 1]
    assert found[1].get("timeline") is None


def test_a_clock_that_is_ahead_is_found_within_its_bound(
    found: list[dict[str, Any]],
) -> None:
    points = found[0]["clocks"][1]
    assert len(points) == 2
    for offset_s, bound_s in points:
        assert 0 < bound_s < 0.5
        assert abs(offset_s + AHEAD_S) <= bound_s


def test_a_rank_whose_clock_is_ahead_is_late_by_its_work_alone(
    found: list[dict[str, Any]],
) -> None:
    row = late_of(found[0]["timeline"]).ranks[1]
    assert row.part == "backward"
    assert row.late_s > 0.5 * SLOW_S
    assert 0 < row.clock_error_s < 0.5


def test_a_model_that_is_observed_no_longer_calls_what_one_never_observed_does(
    found: list[dict[str, Any]],
) -> None:
    for row in found:
        never, observed, off = row["calls"]
        assert off == never
        assert not any("StepWatch" in name for name in off)
        assert set(row["hooks"]) == {0}
        assert len(observed) > len(never)


def test_an_observer_is_called_for_each_event(found: list[dict[str, Any]]) -> None:
    # forward and backward each begin and end, computation ends, 4 gradients,
    # 2 buckets, 3 slices.
    assert [row["counts"] for row in found] == [5 + 4 + 2 + 3] * 3
