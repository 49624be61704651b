"""Steps by DeAR's halves: their period, its bound, and where forward waits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.cost import all_reduce_s, compute_rate
from stretto.errors import SpecError
from stretto.schema import Bucket, Link, Plan, TensorSpec, Workload
from stretto.sim import simulate_step
from stretto.sim.engine import Flow, FlowGate, SharedLink, run
from stretto.sim.flows import bottleneck_link, plan_flows
from stretto.sim.forward_bounds import halves_bound_s
from stretto.testing import strategies as own
from support.instances import one_link


def periods(work, on, choice, *, steps=3):
    """Steps one after another on one lane, by the recursion, from silence on."""
    buckets = [
        work.tensors[first:last]
        for first, last in pairwise((0, *choice.ends))
        if sum(t.bytes for t in work.tensors[first:last])
    ]

    def took(held, part):
        return all_reduce_s(sum(t.bytes for t in held), on, part=part)

    free = now = 0.0
    boundaries = []
    whole = {}
    for _ in range(steps + 1):
        start, done = now, 0.0
        for held in sorted(buckets, key=lambda held: min(t.needed_s for t in held)):
            needed_s = min(t.needed_s for t in held)
            now += needed_s - done
            done = needed_s
            now = max(now, whole.get(held, 0.0))
        now += work.forward_s - done
        boundaries.append(now)
        for held in buckets:
            free = max(free, now + held[-1].ready_s) + took(held, "reduce_scatter")
        last = now + max((held[-1].ready_s for held in buckets), default=0.0)
        latest_first = buckets[::-1]
        order = sorted(latest_first, key=lambda held: min(t.needed_s for t in held))
        for held in order:
            free = max(free, last) + took(held, "all_gather")
            whole[held] = free
        now += work.backward_s
        assert now >= start
    return [after - before for before, after in pairwise(boundaries)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_period_is_what_steps_settle_to(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2, contended=False))
    choice = data.draw(own.choices(work, max_lanes=1, max_slices=1))
    one = choice.plan(work, on, overlap="halves")
    expected = periods(work, on, choice)
    found = simulate_step(work, on, one).iteration_s
    assert expected == pytest.approx([found] * 3, rel=1e-9)


def repeated(work, on, one, *, steps=3):
    """Ends of backward over steps, as one long run of the engine."""
    step_s = work.forward_s + work.backward_s
    flows, gates, marks = [], [], []
    for k in range(steps):
        origin_s = k * step_s + work.forward_s
        gates.append(FlowGate(work_s=origin_s))
        marks.append(len(gates) - 1)
        halves = [
            plan_flows(work, on, one, origin_s=origin_s, part=part)
            for part in ("reduce_scatter", "all_gather")
        ]
        base = len(flows)
        flows += halves[0][0]
        last = max((f.ready_work_s for f in halves[0][0]), default=0.0)
        needed = {t.name: t.needed_s for t in work.tensors}

        def key(item, needed=needed):
            part = item[1]
            names = one.buckets[part.bucket].tensors
            return min(needed[n] for n in names), -part.bucket, part.slice

        for flow, part in sorted(zip(*halves[1], strict=True), key=key):
            flows.append(replace(flow, ready_work_s=last))
            at = origin_s + work.backward_s + key((flow, part))[0]
            gates.append(FlowGate(work_s=at, flows=(len(flows) - 1,)))
        assert len(flows) - base == 2 * len(halves[0][0])
    contention = on.contention
    outcome = run(
        flows,
        [bottleneck_link(on)],
        work_s=steps * step_s + work.forward_s,
        work_rate=partial(compute_rate, contention.compute) if contention else None,
        gates=gates,
    )
    return [*(outcome.passed_s[m] for m in marks), outcome.work_end_s]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_three_steps_in_one_run_have_that_period(data):
    work = data.draw(own.workloads(max_tensors=6))
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on, overlaps=("halves",)))
    assume(work.forward_s > 1e-6)  # else one run's work does not tell steps apart
    result = simulate_step(work, on, one)
    starts = repeated(work, on, one)
    found = [after - before for before, after in pairwise(starts)]
    assert found == pytest.approx([result.iteration_s] * 3, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_period_beats_the_bound_nor_computation(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    one = data.draw(own.plans(work, on, overlaps=("halves",)))
    result = simulate_step(work, on, one)
    bound = halves_bound_s(work, on)
    assert bound >= work.forward_s + work.backward_s
    assert result.iteration_s >= bound * (1 - 1e-12)
    if on.contention is None:
        assert result.iteration_s == pytest.approx(
            work.forward_s + work.backward_s + result.exposed_communication_s, rel=1e-12
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_where_all_is_ready_at_once_it_never_loses_to_overlap_with_backward(data):
    # One lane that never idles: the same work, and nothing awaited earlier than before.
    # Gradients that come apart can lose: all-gathers leave gaps of backward unused.
    work = data.draw(own.workloads())
    late = tuple(replace(t, ready_s=work.backward_s) for t in work.tensors)
    work = replace(work, tensors=late)
    on = data.draw(own.clusters(contended=False))
    choice = data.draw(own.choices(work, max_lanes=1))
    plain = simulate_step(work, on, choice.plan(work, on)).iteration_s
    ahead = simulate_step(work, on, choice.plan(work, on, overlap="halves"))
    assert ahead.iteration_s <= plain * (1 + 1e-12)
    # Where forward needs everything at once there is nothing to hide behind it.
    at_once = replace(
        work, tensors=tuple(replace(t, needed_s=0.0) for t in work.tensors)
    )
    same = simulate_step(at_once, on, choice.plan(at_once, on, overlap="halves"))
    assert same.iteration_s == pytest.approx(plain, rel=1e-12)


def two_layers(*, needed_s=(2.0, 0.0)):
    return Workload(
        name="w",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=4.0,
        backward_s=6.0,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}", bytes=size, dtype="int8", ready_s=at, needed_s=needed
            )
            for i, (size, at, needed) in enumerate(
                zip((8, 4), (3.0, 6.0), needed_s, strict=True)
            )
        ),
    )


def two_ranks(**changes):
    """Two ranks: a byte of the message is one on the wire; 1 B/s, 1 s of start-up."""
    return one_link(Link(latency_s=0.5, bandwidth_bytes_per_s=1.0), **changes)


def buckets(work, on, groups, **values):
    values = {"wire_dtype": "float32"} | values
    return Plan(
        planner="p",
        workload_digest=work.digest,
        ranks=on.ranks,
        overlap="halves",
        lanes=values.pop("lanes", 1),
        buckets=tuple(Bucket(tensors=names, **values) for names in groups),
    )


def test_forward_waits_at_each_first_use():
    # Reduce-scatters 3..7.5 and 7.5..10; all-gathers in the order of need: the second
    # tensor's to 12.5, the first's to 17. Backward ends at 6; forward waits at once
    # until 12.5, works 2 s, waits from 14.5 to 17 and works 2 s more.
    work, on = two_layers(), two_ranks()
    result = simulate_step(work, on, buckets(work, on, [("t0",), ("t1",)]))
    assert result.iteration_s == pytest.approx(19.0, rel=1e-12)
    assert result.exposed_communication_s == pytest.approx(9.0, rel=1e-12)
    compute = [
        (s.name, s.start_s, s.end_s)
        for s in result.timeline.spans
        if s.track == "compute"
    ]
    assert compute == [
        ("backward", 0.0, 6.0),
        ("forward", 12.5, 14.5),
        ("forward", 17.0, 19.0),
    ]
    sends = [s for s in result.timeline.spans if s.args["kind"] == "send"]
    assert [s.name for s in sends] == [
        "bucket 0 reduce-scatter",
        "bucket 1 reduce-scatter",
        "bucket 1 all-gather",
        "bucket 0 all-gather",
    ]
    assert sum(s.args["bytes"] for s in sends) == 2 * work.total_bytes
    assert [s.start_s for s in sends] == pytest.approx([3.0, 7.5, 10.0, 12.5])


def test_the_circle_through_the_last_gradient_binds():
    work, on = two_layers(), two_ranks()
    # From t1's first use at 0 around: 4 + 6 of computation; its all-reduce takes 5 but
    # in slices could send while others of them start up.
    assert halves_bound_s(work, on) == pytest.approx(14.5, rel=1e-12)
    fast = two_ranks(inter_host=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    assert halves_bound_s(work, fast) == pytest.approx(10.0, rel=1e-6)
    slow = two_ranks(inter_host=Link(latency_s=0.0, bandwidth_bytes_per_s=0.1))
    assert halves_bound_s(work, slow) == pytest.approx(120.0, rel=1e-12)


def test_one_rank_waits_for_nothing():
    work, on = two_layers(), two_ranks(hosts=1)
    result = simulate_step(work, on, buckets(work, on, [("t0", "t1")]))
    assert result.iteration_s == halves_bound_s(work, on) == 10.0
    assert result.timeline.tracks == ("compute",)


def test_hidden_halves_cost_nothing():
    work = two_layers(needed_s=(2.0, 1.5))
    on = two_ranks(inter_host=Link(latency_s=0.0, bandwidth_bytes_per_s=20.0))
    plan = buckets(work, on, [("t0",), ("t1",)])
    result = simulate_step(work, on, plan)
    assert result.iteration_s == 10.0
    assert result.exposed_communication_s == 0.0
    plain = simulate_step(work, on, replace(plan, overlap="backward"))
    assert plain.iteration_s > 10.0


def flow(**values):
    defaults = {
        "lane": 0,
        "ready_work_s": 0.0,
        "startup_s": 0.0,
        "wire_bytes": 4.0,
        "cap_bytes_per_s": 1.0,
        "idle_cap_bytes_per_s": 2.0,
    }
    return Flow(**(defaults | values))


def test_flows_go_at_their_idle_rate_while_work_waits():
    # Work reaches the gate at 1, when one of four bytes is sent; three go at 2 B/s.
    link = SharedLink(capacity_bytes_per_s=10.0)
    gate = FlowGate(work_s=1.0, flows=(0,))
    outcome = run([flow()], [link], work_s=3.0, gates=[gate])
    assert outcome.reached_s == (1.0,)
    assert outcome.passed_s == outcome.end_s == (2.5,)
    assert outcome.work_end_s == 4.5


def test_work_that_waits_for_what_waits_for_it_is_refused():
    link = SharedLink(capacity_bytes_per_s=10.0)
    gate = FlowGate(work_s=1.0, flows=(0,))
    with pytest.raises(SpecError, match="waits at 1 s"):
        run([flow(ready_work_s=2.0)], [link], work_s=3.0, gates=[gate])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gates_behind_everything_change_nothing(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on, overlaps=("none", "backward")))
    flows, _ = plan_flows(work, on, one, origin_s=0.0)
    contention = on.contention
    rate = partial(compute_rate, contention.compute) if contention else None
    free = run(flows, [bottleneck_link(on)], work_s=work.backward_s, work_rate=rate)
    open_gates = [FlowGate(work_s=work.backward_s * part) for part in (0.0, 0.5, 1.0)]
    gated = run(
        flows,
        [bottleneck_link(on)],
        work_s=work.backward_s,
        work_rate=rate,
        gates=open_gates,
    )
    assert gated.makespan_s == pytest.approx(free.makespan_s, rel=1e-12)
    assert gated.reached_s == gated.passed_s
