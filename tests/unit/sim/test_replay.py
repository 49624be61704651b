"""The model of one plan says what the simulator says, of every cluster and pace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.sim import StepModel, simulate_step
from stretto.sim.replay import can_replay, prepared
from stretto.testing import strategies as own


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_other_clusters_and_paces_as_simulated(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    drawn = data.draw(own.plans(work, on))
    resource = drawn.buckets[0].resource
    buckets = tuple(replace(b, resource=resource) for b in drawn.buckets)
    drawn = replace(drawn, buckets=buckets)
    model, ready = StepModel(work, on), prepared(work, on, drawn)
    for _ in range(2):
        other = replace(
            data.draw(own.clusters()),
            hosts=on.hosts,
            ranks_per_host=on.ranks_per_host,
        )
        if other.contention is not None and resource is not None:
            levels = tuple(sorted({*other.contention.resources, resource}))
            contention = replace(other.contention, resources=levels)
            other = replace(other, contention=contention)
        pace = data.draw(st.floats(0.5, 2.0))
        paced = replace(
            work,
            backward_s=work.backward_s * pace,
            tensors=tuple(replace(t, ready_s=t.ready_s * pace) for t in work.tensors),
        )
        plan = replace(drawn, workload_digest=paced.digest)
        step = simulate_step(paced, other, plan)
        found = model.on(other, pace=pace).times(ready)
        assert found.end_s == pytest.approx(step.backward_s, rel=1e-9, abs=1e-12)
        assert found.computed_s == pytest.approx(
            step.iteration_s - step.exposed_communication_s - work.forward_s,
            rel=1e-9,
            abs=1e-12,
        )
        ends = dict.fromkeys(range(len(buckets)), 0.0)
        sent = set()
        for span in step.timeline.spans:
            if span.args["kind"] == "send":
                i = span.args["bucket"]
                sent.add(i)
                ends[i] = max(ends[i], span.end_s - work.forward_s)
        expected = list(ends.values()) if len(sent) == len(buckets) else []
        assert list(found.bucket_ends_s) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_it_does_not_know_is_refused(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(contended=True, min_hosts=2))
    plan = data.draw(own.plans(work, on))
    for other in (
        replace(plan, overlap="forward"),
        replace(
            plan, buckets=tuple(replace(b, algorithm="tree") for b in plan.buckets)
        ),
    ):
        assert not can_replay(other)
        with pytest.raises(SpecError, match="cannot be replayed: simulate it"):
            prepared(work, on, other)
    assume(work.total_bytes)
    uniform = tuple(replace(b, resource=9999) for b in plan.buckets)
    with pytest.raises(SpecError, match="resource must be one of"):
        prepared(work, on, replace(plan, buckets=uniform))
