"""Overlap with the next forward: whole all-reduces in launch order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.cost import collective_cost, compute_rate
from stretto.schema import Bucket, Link, Plan, TensorSpec, Workload
from stretto.sim import simulate_step
from stretto.sim.bounds import best_bytes_per_s
from stretto.sim.engine import FlowGate, run
from stretto.sim.flows import bottleneck_link, plan_flows
from stretto.sim.forward_bounds import forward_bound_s
from stretto.testing import strategies as own
from support.instances import one_link


def with_any_needs(data, work):
    needed_s = st.floats(0.0, work.forward_s)
    tensors = tuple(replace(t, needed_s=data.draw(needed_s)) for t in work.tensors)
    return replace(work, tensors=tensors)


def starts_of_backward(work, on, one, *, steps=3):
    """Ends of forward over steps, as one long run of the engine."""
    step_s = work.forward_s + work.backward_s
    needed = {t.name: t.needed_s for t in work.tensors}
    flows, gates = [], []
    for k in range(steps):
        origin_s = k * step_s
        gates.append(FlowGate(work_s=origin_s))
        sent, slices = plan_flows(work, on, one, origin_s=origin_s)
        for flow, part in zip(sent, slices, strict=True):
            flows.append(flow)
            first_s = min(needed[n] for n in one.buckets[part.bucket].tensors)
            at_s = origin_s + work.backward_s + first_s
            gates.append(FlowGate(work_s=at_s, flows=(len(flows) - 1,)))
    contention = on.contention
    outcome = run(
        flows,
        [bottleneck_link(on)],
        work_s=steps * step_s,
        work_rate=partial(compute_rate, contention.compute) if contention else None,
        gates=gates,
    )
    marks = [g for g, gate in enumerate(gates) if not gate.flows]
    return [*(outcome.passed_s[g] for g in marks), outcome.work_end_s]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_three_steps_in_one_run_have_that_period(data):
    work = with_any_needs(data, data.draw(own.workloads(max_tensors=6)))
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on, overlaps=("forward",)))
    assume(work.forward_s > 1e-6)  # else one run's work does not tell steps apart
    period_s = simulate_step(work, on, one).iteration_s
    starts = starts_of_backward(work, on, one)
    found = [after - before for before, after in pairwise(starts)]
    assert found == pytest.approx([period_s] * 3, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_period_beats_the_bound(data):
    work = with_any_needs(data, data.draw(own.workloads()))
    on = data.draw(own.clusters())
    one = data.draw(own.plans(work, on, overlaps=("forward",)))
    result = simulate_step(work, on, one)
    for most in (None, one.lanes):
        bound_s = forward_bound_s(work, on, max_lanes=most)
        assert bound_s >= work.forward_s + work.backward_s
        assert result.iteration_s >= bound_s * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_bound_is_the_largest_over_all_cuts(data):
    work = with_any_needs(data, data.draw(own.workloads()))
    on = data.draw(own.clusters(min_hosts=2))
    cost, bytes_per_s = collective_cost(on, "ring"), best_bytes_per_s(on)
    sent = [t for t in work.tensors if t.bytes]
    largest_s = work.forward_s + work.backward_s
    for first in sent:
        for last in sent:
            between = [
                t.bytes
                for t in sent
                if t.ready_s >= first.ready_s and t.needed_s <= last.needed_s
            ]
            if between:
                takes_s = cost.wire_factor * sum(between) / bytes_per_s
                around_s = first.ready_s + work.forward_s - last.needed_s
                cut_s = around_s + cost.min_startup_s + takes_s
                largest_s = max(largest_s, cut_s)
    assert forward_bound_s(work, on) == pytest.approx(largest_s, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_in_the_order_of_readiness_it_never_loses_to_overlap_with_backward(data):
    work = with_any_needs(data, data.draw(own.workloads()))
    on = data.draw(own.clusters(contended=False))
    choice = data.draw(own.choices(work))
    plain = simulate_step(work, on, choice.plan(work, on))
    ahead = simulate_step(work, on, choice.plan(work, on, overlap="forward"))
    assert ahead.iteration_s <= plain.iteration_s * (1 + 1e-12)
    stalled_s = ahead.iteration_s - work.forward_s - work.backward_s
    assert ahead.exposed_communication_s == pytest.approx(stalled_s, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_forward_that_needs_all_at_once_hides_nothing(data):
    work = data.draw(own.workloads())
    tensors = tuple(replace(t, needed_s=0.0) for t in work.tensors)
    work = replace(work, tensors=tensors)
    on = data.draw(own.clusters())
    choice = data.draw(own.choices(work))
    plain = simulate_step(work, on, choice.plan(work, on)).iteration_s
    ahead = simulate_step(work, on, choice.plan(work, on, overlap="forward"))
    assert ahead.iteration_s == pytest.approx(plain, rel=1e-9)


def three_layers():
    rows = ((4, 2.0, 4.0), (4, 3.0, 2.0), (2, 6.0, 0.0))
    return Workload(
        name="w",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=6.0,
        backward_s=6.0,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}", bytes=size, dtype="int8", ready_s=ready, needed_s=needed
            )
            for i, (size, ready, needed) in enumerate(rows)
        ),
    )


def two_ranks(**changes):
    """Two ranks: a byte of the message is one on the wire; 1 B/s, 1 s of start-up."""
    return one_link(Link(latency_s=0.5, bandwidth_bytes_per_s=1.0), **changes)


def one_bucket_each(work, on, *launch):
    return Plan(
        planner="p",
        workload_digest=work.digest,
        ranks=on.ranks,
        overlap="forward",
        lanes=1,
        buckets=tuple(
            Bucket(tensors=(t.name,), wire_dtype="float32") for t in work.tensors
        ),
        launch=launch,
    )


def test_the_first_layers_bucket_is_last_in_the_order_of_readiness():
    # Sends 2..7, 7..12 and 12..15; forward needs the third first.
    work, on = three_layers(), two_ranks()
    result = simulate_step(work, on, one_bucket_each(work, on))
    assert result.iteration_s == pytest.approx(21.0, rel=1e-12)
    assert result.exposed_communication_s == pytest.approx(9.0, rel=1e-12)


def test_a_launch_order_lets_forward_begin_earlier():
    # Sends t0 2..7, t2 7..10, t1 10..15. Forward waits until 10, works 2 s, waits
    # until 15 and works 4 s.
    work, on = three_layers(), two_ranks()
    result = simulate_step(work, on, one_bucket_each(work, on, 0, 2, 1))
    assert result.iteration_s == pytest.approx(19.0, rel=1e-12)
    spans = result.timeline.spans
    computed = [(s.name, s.start_s, s.end_s) for s in spans if s.track == "compute"]
    assert computed == [
        ("backward", 0.0, 6.0),
        ("forward", 10.0, 12.0),
        ("forward", 15.0, 19.0),
    ]
    sends = [s for s in spans if s.args["kind"] == "send"]
    assert [s.name for s in sends] == ["bucket 0", "bucket 2", "bucket 1"]
    assert [s.start_s for s in sends] == pytest.approx([2.0, 7.0, 10.0])


def test_a_bucket_waits_for_those_before_it_in_launch_order():
    # t2, first in order, is ready at 6 and travels until 9; t0 until 14, t1 until 19.
    work, on = three_layers(), two_ranks()
    result = simulate_step(work, on, one_bucket_each(work, on, 2, 0, 1))
    sends = [s for s in result.timeline.spans if s.args["kind"] == "send"]
    assert [s.start_s for s in sends] == pytest.approx([6.0, 9.0, 14.0])


def test_the_bound_of_the_circle_and_of_the_link():
    work, on = three_layers(), two_ranks()
    # t1 and t2 together are ready from 3 on and needed by 2: 6 bytes after a start-up,
    # and 4 s of forward. All three: 10 bytes from 2 on, and 2 s of forward.
    assert forward_bound_s(work, on) == pytest.approx(max(3 + 1 + 6 + 4, 2 + 1 + 12))
    fast = two_ranks(inter_host=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    assert forward_bound_s(work, fast) == pytest.approx(12.0, rel=1e-6)


def test_one_rank_waits_for_nothing():
    work, on = three_layers(), two_ranks(hosts=1)
    result = simulate_step(work, on, one_bucket_each(work, on, 0, 2, 1))
    assert result.iteration_s == forward_bound_s(work, on) == 12.0
    assert result.timeline.tracks == ("compute",)
