"""Bounds by linear programming: below every plan, and close where they should be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import planners
from stretto.errors import SpecError
from stretto.schema import (
    ComputeContention,
    Contention,
    Link,
    RateCurve,
)
from stretto.sim import lower_bound, simulate_step
from stretto.sim.certificate import idle_bytes_per_s, interval_bound_s, working_modes
from stretto.testing import strategies as own
from support.instances import one_link, workload_of

ALGORITHMS = ("ring", "halving_doubling", "tree", "hierarchical")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_plan_beats_the_interval_bound(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on, algorithms=ALGORITHMS))
    reached = simulate_step(work, on, one).iteration_s
    free = interval_bound_s(work, on, algorithms=ALGORITHMS)
    assert reached >= free * (1 - 1e-9)
    limited = interval_bound_s(work, on, algorithms=ALGORITHMS, max_lanes=one.lanes)
    assert reached >= limited * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_set_of_flows_beats_the_hull(data):
    on = data.draw(own.clusters(min_hosts=2, contended=True))
    work = data.draw(own.workloads(max_tensors=4, min_elements=1))
    modes = working_modes(on)
    speeds = [mode.compute_rate for mode in modes]
    rates = [mode.bytes_per_s for mode in modes]
    assert speeds == sorted(speeds, reverse=True)
    assert rates == sorted(rates)
    lanes = data.draw(st.integers(1, 4))
    fewer = working_modes(on, lanes)
    assert fewer[-1].bytes_per_s <= modes[-1].bytes_per_s * (1 + 1e-9)
    # Each mode of few lanes lies below the hull of any number of lanes.
    for mode in fewer:
        assert mode.bytes_per_s <= _hull_at(modes, mode.compute_rate) * (1 + 1e-9)
    assert interval_bound_s(work, on) <= interval_bound_s(work, on, max_lanes=lanes) * (
        1 + 1e-6
    )


def _hull_at(modes, speed):
    """The most bytes per second of mixtures that compute at least so fast."""
    if speed <= modes[-1].compute_rate:
        return modes[-1].bytes_per_s
    for fast, slow in pairwise(modes):
        if fast.compute_rate >= speed >= slow.compute_rate:
            part = (fast.compute_rate - speed) / (fast.compute_rate - slow.compute_rate)
            return fast.bytes_per_s + part * (slow.bytes_per_s - fast.bytes_per_s)
    raise AssertionError(speed)


def contended(hosts=8, *, latency_s=0.0):
    flat = {"gamma2": 0.0, "gamma3": 0.0, "gamma4": 0.0}
    contention = Contention(
        compute=ComputeContention(alpha1=1.0, alpha2=0.25),
        overlapped=RateCurve(gamma1=2e8, **flat),
        exclusive=RateCurve(gamma1=4e8, **flat),
        resources=(1,),
    )
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=1e9)
    return one_link(link, hosts=hosts, contention=contention)


def evenly(count, size_bytes):
    rows = [(size_bytes, 0.2 * i / count) for i in range(count)]
    return workload_of(rows, dtype="float32", forward_s=0.1, backward_s=0.2)


def test_one_lane_without_startup_is_met_by_the_closed_form():
    """One early gradient: x bytes beside computation slowed to 3/4, the rest alone."""
    on = contended()
    work = evenly(1, 7 * 10**7)
    # 1.75 * 7e7 bytes on the wire; beside: 0.2 s of work in 0.2 / 0.75 s at 2e8.
    beside_s = 0.2 / 0.75
    expected = 0.1 + beside_s + (1.75 * 7e7 - 2e8 * beside_s) / 4e8
    alone = 0.3 + 1.75 * 7e7 / 4e8
    assert expected < alone
    bound = interval_bound_s(work, on, max_lanes=1)
    assert bound == pytest.approx(expected, rel=1e-6)
    one = own.DrawnBuckets(ends=(1,), lanes=1, bucket_lanes=(0,), slices=(1,))
    reached = simulate_step(work, on, one.plan(work, on)).iteration_s
    assert reached == pytest.approx(bound, rel=1e-6)


def test_many_small_buckets_come_close_and_the_closed_forms_do_not():
    on = contended()
    work = evenly(100, 2 * 10**5)
    choice = own.DrawnBuckets(
        ends=tuple(range(1, 101)), lanes=1, bucket_lanes=(0,) * 100, slices=(1,) * 100
    )
    reached = simulate_step(work, on, choice.plan(work, on)).iteration_s
    fast = lower_bound(work, on)
    tight = lower_bound(work, on, certificate="lp", max_lanes=1)
    assert fast.interval_s is None
    assert tight.value_s == tight.interval_s
    assert reached / tight.value_s - 1 < 0.005
    assert reached / fast.value_s - 1 > 0.05


def test_without_contention_it_says_what_the_cut_says():
    on = replace(contended(latency_s=1e-4), contention=None)
    assert idle_bytes_per_s(on) == 1e9
    for size_bytes in (10**7, 10**6):
        work = evenly(30, size_bytes)
        fast = lower_bound(work, on)
        assert interval_bound_s(work, on, intervals=200) == pytest.approx(
            fast.value_s, rel=1e-3
        )


def test_startups_on_one_lane_leave_little_of_the_gap():
    """Long start-ups: few buckets wait for gradients, many start often; a bound that
    knows both is near the exact optimum of fusion.
    """
    on = replace(contended(latency_s=3e-4), contention=None)
    work = evenly(40, 3 * 10**6)
    best_s = planners.get("fusion").plan(work, on).predicted.iteration_s
    one = interval_bound_s(work, on, max_lanes=1)
    many = interval_bound_s(work, on)
    assert many <= one <= best_s * (1 + 1e-9)
    assert best_s / one - 1 < 0.02
    assert best_s / one - 1 < (best_s / many - 1) / 2


def test_all_gradients_at_the_end_are_sent_alone():
    on = contended(latency_s=1e-3)
    work = evenly(3, 10**6)
    tensors = tuple(replace(t, ready_s=0.2) for t in work.tensors)
    work = replace(work, tensors=tensors)
    bound = lower_bound(work, on, certificate="lp")
    assert bound.interval_s == pytest.approx(
        0.3 + 14e-3 + 1.75 * 3e6 / idle_bytes_per_s(on), rel=1e-6
    )


def test_an_unknown_certificate_is_refused():
    with pytest.raises(SpecError, match="certificate must be one of fast, lp"):
        lower_bound(evenly(1, 4), contended(), certificate="best")
