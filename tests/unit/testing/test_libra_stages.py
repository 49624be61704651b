from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import all_reduce_s, collective_cost, curve_bytes_per_s
from stretto.errors import SpecError
from stretto.schema import (
    Bucket,
    ComputeContention,
    Contention,
    Link,
    Plan,
    RateCurve,
)
from stretto.sim import simulate_step
from stretto.testing import strategies as own
from stretto.testing.libra_stages import stage_time_s, stages
from support.instances import one_link, workload_of


@st.composite
def cases(draw, *, single_resource=False):
    """A workload, a contended cluster, groups and a resource for each."""
    work = draw(own.workloads())
    on = draw(own.clusters(min_hosts=2, contended=True))
    choice = draw(own.choices(work, max_lanes=1, max_slices=1))
    levels = on.contention.resources[:1] if single_resource else on.contention.resources
    resources = [draw(st.sampled_from(levels)) for _ in choice.ends]
    return work, on, choice.ends, resources


def planned(work, on, ends, resources):
    names = [t.name for t in work.tensors]
    return Plan(
        planner="p",
        workload_digest=work.digest,
        ranks=on.ranks,
        overlap="backward",
        lanes=1,
        buckets=tuple(
            Bucket(tensors=tuple(names[first:last]), resource=r, wire_dtype="float32")
            for (first, last), r in zip(pairwise((0, *ends)), resources, strict=True)
        ),
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["phase", "mixed"]))
def test_the_simulator_reproduces_the_recursion(case, startup):
    work, on, ends, resources = case
    expected = work.forward_s + stage_time_s(ends, resources, work, on, startup=startup)
    plan = planned(work, on, ends, resources)
    found = simulate_step(work, on, plan, startup=startup).iteration_s
    assert found == pytest.approx(expected, rel=1e-12)


def printed(b, c, sigma, p, q, a):
    """Eq. 8-15 letter by letter: compute sizes b, group sizes c, rates, start-up."""
    total = b[0]
    s = sum(b[1:])
    for i in range(len(c)):
        g, whole = s / sigma[i], p[i] * c[i] + a
        f_o = 0.0 if not c[i] or not s else min(whole, g)
        delta_b = 0.0 if not s else 1 - f_o / g
        delta_c = 0.0 if not c[i] else 1 - f_o / whole
        f_b, f_c = s * delta_b, (q[i] * c[i] + a) * delta_c
        t_b = max(0.0, f_b - sum(b[i + 2 :])) if i + 1 < len(c) else f_b
        total += f_o + t_b + f_c
        s = f_b - t_b
    return total


@settings(max_examples=150, deadline=None)
@given(cases())
def test_mixed_start_up_is_the_printed_recursion(case):
    work, on, ends, resources = case
    ready = [0.0, *(work.tensors[end - 1].ready_s for end in ends)]
    contention = on.contention
    compute = [max(0.0, after - before) for before, after in pairwise(ready)]
    # Backward may continue behind the last gradient: a last group of no bytes.
    compute.append(work.backward_s - ready[-1])
    sizes = [
        sum(t.bytes for t in work.tensors[first:last])
        for first, last in pairwise((0, *ends))
    ]
    cost = collective_cost(on)
    most = cost.wire_factor / ((all_reduce_s(10**9, on) - all_reduce_s(0, on)) / 10**9)

    def seconds_per_byte(curve):
        return [
            cost.wire_factor / min(most, curve_bytes_per_s(curve, r))
            for r in (*resources, resources[-1])
        ]

    sigma = [
        min(1.0, max(0.05, contention.compute.alpha1 - contention.compute.alpha2 * r))
        for r in (*resources, resources[-1])
    ]
    expected = printed(
        compute,
        [*sizes, 0],
        sigma,
        seconds_per_byte(contention.overlapped),
        seconds_per_byte(contention.exclusive),
        cost.startup_s,
    )
    found = stage_time_s(ends, resources, work, on, startup="mixed")
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


def constant(rate):
    return RateCurve(gamma1=rate, gamma2=0.0, gamma3=0.0, gamma4=0.0)


def cluster(**changes):
    """Two ranks; 1 s of start-up; 1 B/s beside computation, 2 B/s alone."""
    link = Link(latency_s=0.5, bandwidth_bytes_per_s=100.0)
    contention = Contention(
        compute=ComputeContention(alpha1=1.0, alpha2=0.25),
        overlapped=constant(1.0),
        exclusive=constant(2.0),
        resources=(1, 2),
    )
    return one_link(link, **({"contention": contention} | changes))


def test_the_two_readings_of_a_start_up_differ_where_computation_ends_first():
    # 3 s of work at half speed last 6 s: beside it 1 s of start-up and 5 of 9 bytes.
    work = workload_of([(9, 2.0)], backward_s=5.0)
    by_phase = stages([1], [2], work, cluster(), startup="phase")
    assert by_phase[0].compute_s == 2.0
    assert by_phase[1].overlapped_s == pytest.approx(6.0)
    assert by_phase[1].communication_s == pytest.approx(4 / 2)
    # Spread: 6 of 10 s done, 0.4 of 9 / 2 + 1 s left.
    mixed = stages([1], [2], work, cluster(), startup="mixed")
    assert mixed[1].communication_s == pytest.approx(0.4 * 5.5)
    assert stage_time_s([1], [2], work, cluster()) == pytest.approx(2 + 6 + 2.2)


def test_without_anything_left_to_compute_both_readings_are_the_closed_form():
    work = workload_of([(9, 2.0)], backward_s=2.0)
    for startup in ("phase", "mixed"):
        took = stage_time_s([1], [1], work, cluster(), startup=startup)
        assert took == pytest.approx(2 + 1 + 9 / 2, rel=1e-12)


def test_a_start_up_may_outlast_computation():
    # 0.25 s at half speed: 0.5 of the start-up; 0.5 and all bytes are left.
    work = workload_of([(9, 2.0)], backward_s=2.25)
    took = stage_time_s([1], [2], work, cluster(), startup="phase")
    assert took == pytest.approx(2 + 0.5 + 0.5 + 4.5, rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(cases(single_resource=True), st.sampled_from(["phase", "mixed"]))
def test_less_contention_never_takes_longer(case, startup):
    work, on, ends, resources = case
    contention = on.contention
    # Alone no slower than beside computation, as on any machine.
    contention = replace(contention, exclusive=contention.overlapped)
    on = replace(on, contention=contention)
    calm = replace(
        contention,
        compute=replace(contention.compute, alpha2=contention.compute.alpha2 / 2),
    )
    took = stage_time_s(ends, resources, work, on, startup=startup)
    freer = stage_time_s(
        ends, resources, work, replace(on, contention=calm), startup=startup
    )
    assert freer <= took * (1 + 1e-12)
    assert took >= work.backward_s * (1 - 1e-12)


def test_bad_groups_are_named():
    work, on = workload_of([(1, 0.0), (1, 1.0)], backward_s=1.0), cluster()
    with pytest.raises(SpecError, match=r"ascend to the number of tensors \(2\)"):
        stage_time_s([1], [1], work, on)
    with pytest.raises(SpecError, match=r"ascend .* got \[2, 2\]"):
        stage_time_s([2, 2], [1, 1], work, on)
    with pytest.raises(SpecError, match=r"one per group \(2\), got 1"):
        stage_time_s([1, 2], [1], work, on)
    with pytest.raises(SpecError, match="phase, mixed, got 'spread'"):
        stage_time_s([2], [1], work, on, startup="spread")
    with pytest.raises(SpecError, match="has no contention"):
        stage_time_s([2], [1], work, cluster(contention=None))
