"""The line that says what tuning chose: numbers of one kind, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.demo.driver import bound_notes, spread_notes
from stretto.tune.cached_plans import settled_of
from stretto.tune.plan_cache import CachedPlan, TunedJob
from stretto.tune.result import TuningResult, summary

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload


@pytest.fixture
def settled(workload: Workload, cluster: Cluster) -> TuningResult:
    return TuningResult(
        workload=workload,
        cluster=cluster,
        plan=planners.get("joint").plan(workload, cluster),
        ddp=planners.get("ddp").plan(workload, cluster),
    )


def test_measured_is_compared_with_measured(settled: TuningResult) -> None:
    line = summary(replace(settled, step_s=0.3, ddp_step_s=0.6, bound_s=0.27))
    assert "measured step 300 ms against 600 ms with DDP's buckets (50 % saved)" in line
    assert line.endswith("1.11 times the lower bound")
    assert "predicted" not in line


def test_a_measured_step_is_never_compared_with_a_predicted_one(
    settled: TuningResult,
) -> None:
    assert settled.plan.predicted is not None
    assert settled.ddp.predicted is not None
    ours_s = settled.plan.predicted.iteration_s
    theirs_s = settled.ddp.predicted.iteration_s
    line = summary(replace(settled, step_s=0.533))
    assert "measured step 533 ms; predicted step" in line
    assert f"({100 * (1 - ours_s / theirs_s):.0f} % saved)" in line
    assert "predicted with DDP's buckets" in line


@pytest.mark.parametrize(
    ("slices", "lanes", "says"),
    [
        (2, 3, "1 bucket in 2 slices on 2 lanes"),
        (1, 3, "planned: 1 bucket on 1 lane"),
        (4, 3, "1 bucket in 4 slices on 3 lanes"),
    ],
)
def test_lanes_without_a_slice_are_not_counted(
    settled: TuningResult, slices: int, lanes: int, says: str
) -> None:
    names = tuple(n for bucket in settled.plan.buckets for n in bucket.tensors)
    bucket = replace(settled.plan.buckets[0], tensors=names, lane=1, slices=slices)
    plan = replace(settled.plan, buckets=(bucket,), lanes=lanes)
    assert says in summary(replace(settled, plan=plan))


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ((1, 1), "planned: 2 buckets on "),
        ((4, 4), "planned: 2 buckets of 4 slices each on "),
        ((3, 1), "planned: 2 buckets of 1 to 3 slices each on "),
    ],
)
def test_slices_are_counted_by_bucket(
    settled: TuningResult, slices: tuple[int, int], says: str
) -> None:
    names = tuple(n for bucket in settled.plan.buckets for n in bucket.tensors)
    buckets = tuple(
        replace(settled.plan.buckets[0], tensors=part, slices=number)
        for part, number in zip((names[:1], names[1:]), slices, strict=True)
    )
    plan = replace(settled.plan, buckets=buckets, lanes=4)
    assert says in summary(replace(settled, plan=plan))


def test_where_ddp_s_buckets_stay_nothing_is_saved(settled: TuningResult) -> None:
    kept = replace(settled, plan=settled.ddp, step_s=0.34, ddp_step_s=0.34)
    line = summary(kept)
    assert line.startswith("DDP's buckets kept: measured step 340 ms")
    assert "saved" not in line
    assert kept.saved_ratio == 0


@pytest.mark.parametrize(
    ("bound_s", "ending"),
    [
        (0.31, "as fast as the lower bound, within its error"),
        (
            4.85,
            (
                "below the lower bound of 4.85 s: the profile was taken on a busier "
                "machine, and its bound does not hold"
            ),
        ),
    ],
)
def test_no_step_is_more_than_the_whole_of_its_bound(
    settled: TuningResult, bound_s: float, ending: str
) -> None:
    line = summary(replace(settled, step_s=0.3, ddp_step_s=0.6, bound_s=bound_s))
    assert line.endswith(ending)
    assert "times the lower bound" not in line


def test_a_cached_plan_saves_what_was_measured_in_turns_then(
    settled: TuningResult,
) -> None:
    job = TunedJob(name="j", model="m", hosts=4, ranks_per_host=1, environment="")
    found = CachedPlan(
        job=job,
        plan=settled.plan,
        workload=settled.workload,
        cluster=settled.cluster,
        step_s=0.2,
        ddp_step_s=0.4,
    )
    again = settled_of(found, 0.38)  # on a busier machine
    assert again.saved_ratio == pytest.approx(0.5)
    assert "(50 % saved when it settled)" in summary(again)


def test_the_demo_says_where_its_bound_does_not_hold() -> None:
    assert bound_notes(0.26, 0.25) == ()
    (note,) = bound_notes(0.5, 0.25)
    assert "2.0 times as busy" in note
    assert "are invalid" in note


def test_the_demo_says_how_unsteady_its_profile_was() -> None:
    assert spread_notes(0.2) == ()
    (note,) = spread_notes(1.2)
    assert "120 % of the median" in note
