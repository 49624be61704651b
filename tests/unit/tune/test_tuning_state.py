"""What a run that ends before tuning has settled keeps, and what it says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.schema.tuning import TuningEvent
from stretto.tune.calibration import CalibratedModel
from stretto.tune.initial_profile import ProfileResult
from stretto.tune.plan_cache import CachedPlan, PlanCache, TunedJob
from stretto.tune.search import CONTROL, Search
from stretto.tune.trial import SearchLimits
from stretto.tune.tuning_state import TuningState, best_so_far, save_unfinished

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.schema import Cluster, Workload
    from stretto.tune.result import TuningResult

JOB = TunedJob(
    name="small",
    model="sha256:1",
    hosts=4,
    ranks_per_host=1,
    environment="torch 2.13 gloo cpu",
)


@pytest.fixture
def profile(workload: Workload, cluster: Cluster) -> ProfileResult:
    return ProfileResult(
        workload=workload,
        cluster=cluster,
        plan=planners.get("joint").plan(workload, cluster),
        ddp=planners.get("ddp").plan(workload, cluster),
        probe_s=0.1,
    )


def search_of(profile: ProfileResult) -> Search:
    calibrated = CalibratedModel(profile.workload, profile.cluster)
    return Search(
        starts=[("planner", profile.plan), ("ddp", profile.ddp)],
        arms={},
        plan_of=calibrated.plan_of,
        floor_s=calibrated.floor_s,
        bound_s=calibrated.bound_s,
        limits=SearchLimits(lost_ratio=1e9),
        baseline=profile.ddp,
    )


def steps(search: Search, *steps_s: float) -> None:
    """Counted steps of the block under way, and of those that follow it."""
    if not search.trials:
        search.next_trial()
    for step_s in steps_s:
        if search.step(step_s):
            search.next_trial()


def pairs(search: Search, incumbent_s: float, other_s: float) -> None:
    """Steps until the other plan is the incumbent."""
    first = None
    while first is None or search.incumbent is first:
        technique = search.trials[-1].technique if search.trials else ""
        control = first is None or technique == CONTROL
        steps(search, incumbent_s if control else other_s)
        first = first or search.incumbent


def earlier(profile: ProfileResult, unfinished_steps: int | None) -> CachedPlan:
    return CachedPlan(
        job=JOB,
        plan=profile.plan,
        workload=profile.workload,
        cluster=profile.cluster,
        step_s=0.2,
        ddp_step_s=0.4,
        number=1,
        unfinished_steps=unfinished_steps,
    )


class Files:
    """What was given to be written."""

    def __init__(self) -> None:
        self.given: list[TuningResult | None] = []

    def __call__(self, so_far: TuningResult | None) -> str:
        self.given.append(so_far)
        return "this is in plan.json"


def test_the_best_so_far_needs_three_counted_steps(profile: ProfileResult) -> None:
    search = search_of(profile)
    assert best_so_far(search) is None
    steps(search, 0.1, 0.1)
    assert best_so_far(search) is None
    steps(search, 0.1)
    best = best_so_far(search)
    assert best is not None
    assert best.plan is profile.plan
    steps(search, 0.05, 0.05)
    assert best_so_far(search) is best
    short = search_of(profile)
    steps(short, 0.01, 0.01, 0.01)  # the trial continues, for its steps are short
    assert short.incumbent is None
    best = best_so_far(short)
    assert best is not None
    assert best.step_s == 0.01
    failed = search_of(profile)
    failed.next_trial()
    failed.fail("no memory")
    assert best_so_far(failed) is None


@pytest.fixture
def short_run(profile: ProfileResult) -> TuningState:
    """Return a run of 17 steps in which DDP's buckets were faster than the plan."""
    search = search_of(profile)
    pairs(search, 0.3, 0.2)
    known = TuningState(name="small", steps=17, job=JOB, profile=profile, search=search)
    known.events.append(TuningEvent(step=9, what="tried", why="", values={}))
    return known


def test_what_a_short_run_found_out_is_cached_as_unfinished(
    profile: ProfileResult, short_run: TuningState, tmp_path: Path
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    save_unfinished(short_run, memory, Files())
    found = memory.exact(JOB)
    assert found is not None
    assert found.plan == profile.ddp
    assert (found.step_s, found.ddp_step_s) == (pytest.approx(0.2), found.step_s)
    assert found.unfinished_steps == 17  # those whose backward has reduced
    assert (found.workload, found.cluster) == (profile.workload, profile.cluster)


def test_what_a_short_run_found_out_is_given_to_its_files(
    profile: ProfileResult, short_run: TuningState, tmp_path: Path
) -> None:
    files = Files()
    save_unfinished(short_run, PlanCache(tmp_path / "plans.sqlite", strict=True), files)
    (given,) = files.given
    assert given is not None
    assert given.plan == profile.ddp
    assert short_run.search is not None
    assert given.bound_s == short_run.search.bound_s
    assert given.record is not None
    assert [event.what for event in given.record.events] == ["tried"]


def test_what_a_short_run_found_out_is_logged_in_one_line(
    short_run: TuningState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    with caplog.at_level(logging.INFO):
        save_unfinished(short_run, memory, Files())
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("tuning had not settled after 17 steps; best so far, ")
    assert "measured step 200 ms" in line
    assert line.endswith("continues from there; this is in plan.json")


def test_before_the_first_trial_nothing_is_cached_and_only_who_asked_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    known = TuningState(name="small", steps=3, job=JOB)
    save_unfinished(known, memory)
    save_unfinished(known, memory, lambda _so_far: "")
    assert not caplog.records
    save_unfinished(
        known, memory, lambda so_far: "not written: p" if so_far is None else ""
    )
    (record,) = caplog.records
    line = record.getMessage()
    assert line == "tuning had not settled after 3 steps; not written: p"
    assert memory.all() == []


def test_too_few_steps_for_a_trial_give_the_measurements_to_who_asked(
    profile: ProfileResult, tmp_path: Path
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    search = search_of(profile)
    steps(search, 0.3)
    files = Files()
    save_unfinished(
        TuningState(name="s", steps=9, job=JOB, profile=profile, search=search),
        memory,
        files,
    )
    (given,) = files.given
    assert given is not None
    assert (given.plan, given.step_s) == (profile.plan, None)
    assert memory.all() == []


@pytest.mark.parametrize("stale", [False, True])
def test_a_plan_taken_up_stays_until_its_steps_take_longer(
    profile: ProfileResult, tmp_path: Path, stale: bool
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    settled = earlier(profile, None)
    memory.store(settled)
    known = TuningState(name="s", steps=6, job=JOB, checked=settled, stale=stale)
    files = Files()
    save_unfinished(known, memory, files)
    (given,) = files.given
    if stale:
        assert given is None
    else:
        assert given is not None
        assert given.from_cache
        assert (given.plan, given.step_s) == (profile.plan, 0.2)
    found = memory.exact(JOB)
    assert found is not None
    assert found.unfinished_steps is None
    # The same in trials.
    known.profile, known.search = profile, search_of(profile)
    steps(known.search, *[0.3] * 3)
    # It took twice the plan's step then, so it would now.
    assert known.ddp_step_s == (None if stale else pytest.approx(0.6))
    save_unfinished(known, memory)
    found = memory.exact(JOB)
    assert found is not None
    kept = (found.unfinished_steps, found.step_s)
    assert kept == ((6, 0.3) if stale else (None, 0.2))


def test_runs_that_are_each_too_short_share_one_search(
    profile: ProfileResult, tmp_path: Path
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    known = TuningState(name="s", job=JOB, steps=39, checked=earlier(profile, 30))
    known.profile, known.search = profile, search_of(profile)
    assert known.steps_left(100) == 70
    assert known.steps_left(40) == 24
    assert known.steps_left(10) == 10
    steps(known.search, *[0.3] * 3)
    save_unfinished(known, memory)
    found = memory.exact(JOB)
    assert found is not None
    assert found.unfinished_steps == 69
    # What another time contradicts is no beginning.
    known.stale = True
    assert known.steps_left(40) == 40
    # A settled plan's own search takes nothing from this one.
    assert TuningState(name="s", checked=earlier(profile, None)).steps_left(100) == 100


def test_a_forked_process_and_an_error_at_the_end_are_no_trouble(
    profile: ProfileResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    search = search_of(profile)
    steps(search, *[0.3] * 3)
    known = TuningState(
        name="s", steps=9, job=JOB, profile=profile, search=search, pid=1
    )
    files = Files()
    save_unfinished(known, memory, files)
    assert files.given == []
    assert memory.all() == []

    def fails(_so_far: TuningResult | None) -> str:
        raise OSError("the disk is full")

    known.pid = TuningState(name="s").pid
    save_unfinished(known, memory, fails)
    (record,) = caplog.records
    assert "cannot save the unfinished tuning: the disk is full" in record.getMessage()
