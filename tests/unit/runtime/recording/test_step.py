from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.runtime.recording.step import BucketRow, Recorder, StepWatch

if TYPE_CHECKING:
    from stretto.schema import Timeline

ROWS = [
    BucketRow(tensors=("c", "b"), slices=((0, 40), (1, 40))),
    BucketRow(tensors=("a",), slices=((0, 12),)),
]


def record(finishes: list[tuple[int, int, float]]) -> Timeline:
    recorder = Recorder()
    recorder.attached(["a", "b", "c"], ROWS)
    recorder.forward_started(100.0)
    recorder.forward_ended(101.0)
    recorder.backward_started(101.5)
    recorder.gradient_ready(2, 102.0)
    recorder.gradient_ready(1, 102.5)
    recorder.bucket_launched(0, 102.5)
    recorder.gradient_ready(0, 103.0)
    recorder.bucket_launched(1, 103.0)
    for bucket, lane, end_s in finishes:
        recorder.slice_finished(bucket, lane, 1, end_s)
    recorder.backward_computed(103.1)
    recorder.backward_ended(106.0)
    assert recorder.ready_s == {"c": 0.5, "b": 1.0, "a": 1.5}
    assert recorder.timeline is not None
    return recorder.timeline


def test_times_count_from_forward_and_a_bucket_waits_for_its_lane() -> None:
    timeline = record([(0, 1, 103.5), (0, 0, 104.0), (1, 0, 105.0)])
    rows = [
        (s.track, s.name, s.args["kind"], s.start_s, s.end_s) for s in timeline.spans
    ]
    assert rows == [
        ("compute", "forward", "forward", 0.0, 1.0),
        ("compute", "backward", "backward", 1.5, 103.1 - 100.0),
        ("lane1", "bucket 0 slice 2/2", "send", 2.5, 3.5),
        ("lane0", "bucket 0 slice 1/2", "send", 2.5, 4.0),
        ("lane0", "wait bucket 1", "wait", 3.0, 4.0),
        ("lane0", "bucket 1", "send", 4.0, 5.0),
    ]
    assert [s.args.get("bytes") for s in timeline.spans[2:]] == [40, 40, 12, 12]


@given(st.lists(st.floats(103.0, 110.0), min_size=3, max_size=3))
@settings(max_examples=50)
def test_sends_never_overlap_on_a_lane_in_whatever_order_they_end(
    ends_s: list[float],
) -> None:
    timeline = record(list(zip((0, 0, 1), (0, 1, 0), ends_s, strict=True)))
    for track in ("lane0", "lane1"):
        sends = sorted(
            (s.start_s, s.end_s)
            for s in timeline.spans
            if s.track == track and s.args["kind"] == "send"
        )
        for (_, end_s), (start_s, _) in itertools.pairwise(sends):
            assert start_s >= end_s


def test_only_the_last_steps_are_kept() -> None:
    recorder = Recorder(keep=2)
    for _ in range(5):
        recorder.forward_started(1.0)
        recorder.backward_ended(2.0)
    assert len(recorder.timelines) == 2
    recorder.clear()
    assert recorder.timeline is None
    assert recorder.ready_s == {}


def test_backwards_within_one_forward_are_steps_of_their_own() -> None:
    recorder = Recorder()
    recorder.attached(["a", "b", "c"], ROWS)
    recorder.forward_started(100.0)
    for start_s in (101.0, 111.0):
        recorder.gradient_ready(2, start_s)
        recorder.bucket_launched(0, start_s)
        recorder.slice_finished(0, 0, 1, start_s + 2.0)
        recorder.backward_computed(start_s + 1.0)
        recorder.backward_ended(start_s + 3.0)
    recorder.forward_ended(120.0)
    (first, _), (second, _) = recorder.steps
    assert first.forward_s == (100.0, 101.0)
    assert second.forward_s == (104.0, 111.0)
    for step, start_s in ((first, 101.0), (second, 111.0)):
        assert step.backward_s == start_s
        assert step.computed_s == start_s + 1.0
        assert step.finished == ((0, 0, start_s + 2.0),)
    assert second.number == first.number + 1


def test_parameters_that_were_frozen_at_the_start_are_recorded_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(
        requires_grad=False
    )
    recorder = Recorder()
    recorder.attached([name for name, _ in model.named_parameters()], ROWS)
    watch = StepWatch(recorder, model, list(model.parameters()))
    model.requires_grad_(requires_grad=True)
    model(torch.ones(1, 2)).sum().backward()
    watch.remove()
    assert set(recorder.ready_s) == {name for name, _ in model.named_parameters()}
