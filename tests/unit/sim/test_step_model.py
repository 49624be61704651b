"""The model for searches says what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.sim import StepModel, simulate_step
from stretto.testing import strategies as own

ALGORITHMS = ("ring", "halving_doubling", "tree", "hierarchical")


@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mixed_algorithms_and_resources_as_simulated(overlap, data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    choice = data.draw(own.choices(work, max_lanes=4, max_slices=5))
    levels = [None] if on.contention is None else [None, *on.contention.resources]
    resources = [data.draw(st.sampled_from(levels)) for _ in choice.ends]
    algorithms = [data.draw(st.sampled_from(ALGORITHMS)) for _ in choice.ends]
    plan = choice.plan(work, on)
    buckets = tuple(
        replace(bucket, resource=resource, algorithm=algorithm)
        for bucket, resource, algorithm in zip(
            plan.buckets, resources, algorithms, strict=True
        )
    )
    launch = ()
    if overlap == "forward":
        launch = tuple(data.draw(st.permutations(range(len(buckets)))))
    plan = replace(plan, buckets=buckets, overlap=overlap, launch=launch)
    expected = simulate_step(work, on, plan).iteration_s
    fast = StepModel(work, on).iteration_s(
        choice.ends,
        choice.lanes,
        choice.bucket_lanes,
        choice.slices,
        resources,
        algorithms,
        overlap,
        launch,
    )
    assert fast == pytest.approx(expected, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_naming_the_default_choices_changes_nothing(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    choice = data.draw(own.choices(work))
    args = (choice.ends, choice.lanes, choice.bucket_lanes, choice.slices)
    default = None if on.contention is None else on.contention.resources[0]
    named = ([default] * len(choice.ends), ["ring"] * len(choice.ends))
    model = StepModel(work, on)
    assert model.iteration_s(*args, *named) == model.iteration_s(*args)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_another_cluster_and_pace_as_a_model_made_for_them(data):
    work = data.draw(own.workloads())
    one, other = data.draw(own.clusters()), data.draw(own.clusters())
    pace = data.draw(st.floats(0.5, 2.0))
    choice = data.draw(own.choices(work))
    args = (choice.ends, choice.lanes, choice.bucket_lanes, choice.slices)
    paced = replace(
        work,
        backward_s=work.backward_s * pace,
        tensors=tuple(replace(t, ready_s=t.ready_s * pace) for t in work.tensors),
    )
    model = StepModel(work, one)
    before_s = model.iteration_s(*args)
    for overlap in ("none", "backward", "forward"):
        expected = StepModel(paced, other).iteration_s(*args, overlap=overlap)
        found = model.on(other, pace=pace).iteration_s(*args, overlap=overlap)
        assert found == pytest.approx(expected, rel=1e-12)
    assert model.iteration_s(*args) == before_s


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_needs_in_any_order_as_simulated(data):
    work = data.draw(own.workloads())
    needed_s = st.floats(0.0, work.forward_s)
    tensors = tuple(replace(t, needed_s=data.draw(needed_s)) for t in work.tensors)
    work = replace(work, tensors=tensors)
    on = data.draw(own.clusters(min_hosts=2))
    choice = data.draw(own.choices(work, max_lanes=4, max_slices=5))
    launch = tuple(data.draw(st.permutations(range(len(choice.ends)))))
    plan = choice.plan(work, on, overlap="forward", launch=launch)
    args = (choice.ends, choice.lanes, choice.bucket_lanes, choice.slices)
    fast = StepModel(work, on).iteration_s(*args, overlap="forward", launch=launch)
    assert fast == pytest.approx(simulate_step(work, on, plan).iteration_s, rel=1e-9)


@given(own.workloads(max_tensors=1), own.clusters())
@settings(max_examples=1)
def test_halves_are_no_draft(work, on):
    with pytest.raises(SpecError, match="overlap must be one of none, backward, for"):
        StepModel(work, on).iteration_s((1,), 1, (0,), (1,), overlap="halves")


@given(own.workloads(), own.clusters(contended=True, min_hosts=2))
@settings(max_examples=20, deadline=None)
def test_an_unknown_resource_is_refused(work, on):
    work = replace(work, tensors=(replace(work.tensors[0], bytes=4),))
    with pytest.raises(SpecError, match="resource must be one of"):
        StepModel(work, on).iteration_s((1,), 1, (0,), (1,), (9999,))
