from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.runtime.recording.clocks import ClockMap, ClockPoint
from stretto.runtime.recording.gathering import RankRecord
from stretto.runtime.recording.merging import merged_timeline
from stretto.runtime.recording.step import BucketRow, StepMarks

if TYPE_CHECKING:
    from stretto.schema import Timeline

ROWS = (
    BucketRow(tensors=("b",), slices=((0, 40),)),
    BucketRow(tensors=("a",), slices=((0, 12), (1, 12))),
)


def step(number: int, start_s: float, backward_s: float) -> StepMarks:
    """A step whose backward takes ``backward_s`` and whose communication ends at 10."""
    computed_s = start_s + 1 + backward_s
    end_s = 100.0 * number + 10.0
    return StepMarks(
        number=number,
        forward_s=(start_s, start_s + 1),
        backward_s=start_s + 1,
        computed_s=computed_s,
        ended_s=end_s,
        launched=((0, computed_s - 0.5), (1, computed_s)),
        finished=((0, 0, end_s - 1.0), (1, 1, end_s - 0.5), (1, 0, end_s)),
    )


def record(steps: tuple[StepMarks, ...], offset_s: float = 0.0) -> RankRecord:
    """The record of a rank whose clock is behind the reference's by ``offset_s``."""
    point = ClockPoint(at_s=0.0, offset_s=offset_s, bound_s=1e-3)
    return RankRecord(
        host="host",
        steps=tuple(s.shifted(-offset_s) for s in steps),
        clock=ClockMap(points=(point,) if offset_s else ()),
    )


def merged() -> Timeline:
    records = {
        0: record((step(0, 0.0, 2.0), step(1, 100.0, 2.0), step(2, 200.0, 2.0))),
        1: record((step(0, 0.5, 5.0), step(1, 100.5, 5.0)), offset_s=5000.0),
    }
    return merged_timeline("all", records, dict.fromkeys(range(3), ROWS))


def test_a_rank_waits_for_the_last_one_and_then_for_the_network() -> None:
    timeline = merged()
    assert timeline.ranks == (0, 1)
    rows = [
        (s.track, s.name, s.args["kind"], s.start_s, s.end_s)
        for s in timeline.of_rank(0, step=0).spans
    ]
    assert rows == [
        ("compute", "forward", "forward", 0.0, 1.0),
        ("compute", "backward", "backward", 1.0, 3.0),
        ("compute", "waits for rank 1", "peer", 3.0, 6.5),
        ("compute", "waits for communication", "exposed", 6.5, 10.0),
        ("lane0", "bucket 0 waits for rank 1", "peer", 2.5, 6.0),
        ("lane0", "bucket 0", "send", 6.0, 9.0),
        ("lane1", "bucket 1 slice 2/2 waits for rank 1", "peer", 3.0, 6.5),
        ("lane1", "bucket 1 slice 2/2", "send", 6.5, 9.5),
        ("lane0", "wait bucket 1 slice 1/2", "wait", 3.0, 9.0),
        ("lane0", "bucket 1 slice 1/2", "send", 9.0, 10.0),
    ]


def test_the_last_rank_waits_for_no_rank_and_is_on_the_first_one_s_clock() -> None:
    spans = merged().of_rank(1, step=0).spans
    rows = [(s.name, round(s.start_s, 6), round(s.end_s, 6)) for s in spans]
    assert rows[:4] == [
        ("forward", 0.5, 1.5),
        ("backward", 1.5, 6.5),
        ("waits for communication", 6.5, 10.0),
        ("bucket 0", 6.0, 9.0),
    ]
    assert not any(s.args["kind"] == "peer" for s in spans)
    assert spans[0].args["clock_error_s"] == pytest.approx(1e-3 + 200e-6 * 4999.5)


def test_only_steps_that_all_ranks_have_are_taken_with_the_time_between_them() -> None:
    timeline = merged()
    assert {s.args["step"] for s in timeline.spans} == {0, 1}
    (between,) = (s for s in timeline.of_rank(1).spans if s.args["kind"] == "outside")
    assert (between.args["step"], between.name) == (1, "between steps")
    assert between.start_s == pytest.approx(10.0)
    assert between.end_s == pytest.approx(100.5)


def test_records_without_a_common_step_give_an_empty_timeline() -> None:
    records = {0: record((step(0, 0.0, 1.0),)), 1: record((step(1, 100.0, 1.0),))}
    assert merged_timeline("x", records, {0: ROWS, 1: ROWS}).spans == ()
    assert merged_timeline("x", {}, {}).spans == ()
