from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from stretto.runtime.recording.clocks import (
    DRIFT_RATIO,
    ClockMap,
    ClockPoint,
    TimeRequest,
    answer_rank,
    ask_reference,
    clock_name,
    point_of,
)
from stretto.runtime.recording.gathering import wait_for_keys

TRIPS = st.lists(
    st.tuples(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.2)),
    min_size=1,
    max_size=20,
)


@given(offset_s=st.floats(-1e5, 1e5), trips=TRIPS)
@settings(max_examples=200)
def test_the_offset_is_within_its_bound_however_long_the_ways_take(
    offset_s: float, trips: list[tuple[float, float, float]]
) -> None:
    requests = []
    now_s = 50.0
    for there_s, back_s, pause_s in trips:
        sent_s = now_s
        now_s += there_s
        reference_s = now_s + offset_s
        now_s += back_s
        requests.append(
            TimeRequest(sent_s=sent_s, reference_s=reference_s, answered_s=now_s)
        )
        now_s += pause_s
    point = point_of(requests)
    slack_s = 1e-9
    assert abs(point.offset_s - offset_s) <= point.bound_s + slack_s
    quickest_s = min(a.answered_s - a.sent_s for a in requests)
    assert point.bound_s <= quickest_s / 2 + slack_s


def test_clocks_that_drift_apart_meanwhile_leave_the_quickest_asking() -> None:
    requests = [
        TimeRequest(sent_s=0.0, reference_s=10.5, answered_s=1.0),
        TimeRequest(sent_s=100.0, reference_s=112.0, answered_s=100.5),
    ]
    point = point_of(requests)
    assert point.offset_s == pytest.approx(11.75)
    assert point.bound_s == pytest.approx(0.25)


def test_a_steady_drift_is_followed_between_two_points() -> None:
    begin = ClockPoint(at_s=100.0, offset_s=7.0, bound_s=1e-4)
    end = ClockPoint(at_s=1100.0, offset_s=7.05, bound_s=2e-4)  # 50 in a million
    clock = ClockMap(points=(begin, end))
    assert clock.offset_s(600.0) == pytest.approx(7.025)
    assert clock.bound_s(600.0) == 2e-4
    assert clock.offset_s(1200.0) == 7.05
    assert clock.bound_s(1200.0) == pytest.approx(2e-4 + 100 * DRIFT_RATIO)
    assert ClockMap().offset_s(5.0) == ClockMap().bound_s(5.0) == 0.0


def test_a_rank_asks_and_the_reference_answers_through_the_store() -> None:
    store = HashStore()
    answering = threading.Thread(target=answer_rank, args=(store, "here"))
    answering.start()
    point = ask_reference(store, "here")
    answering.join(10.0)
    assert not answering.is_alive()
    assert point is not None
    assert abs(point.offset_s) <= point.bound_s  # it is the same clock
    assert store.num_keys() <= 1  # nothing stays but what the store itself keeps


def test_without_an_answer_the_asking_ends() -> None:
    assert ask_reference(HashStore(), "here") is None


def test_waiting_returns_which_keys_came() -> None:
    store = HashStore()
    store.set("a", "1")
    assert wait_for_keys(store, ["a", "b"], deadline_s=0.0) == {"a"}


def test_processes_of_one_host_read_one_clock() -> None:
    assert clock_name() == clock_name()
