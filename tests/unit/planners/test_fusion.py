"""The exact fusion against brute force, and against the greedy that it replaces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import planners
from stretto.planners.base import LinearCost
from stretto.planners.exhaustive import all_fusions
from stretto.planners.fusion import FusionProblem
from stretto.schema import TensorSpec, Workload
from stretto.sim.step_model import StepModel


def finish_of(problem: FusionProblem, ends) -> float:
    """End of a fusion's last bucket that is not empty, straight from the definition."""
    end_s, start = 0.0, 0
    for end in ends:
        bucket = problem.workload.tensors[start:end]
        size = sum(t.bytes for t in bucket)
        if size:
            end_s = max(end_s, bucket[-1].ready_s) + problem.cost.of(size)
        start = end
    return end_s


def sent_buckets(problem: FusionProblem, ends) -> int:
    starts = (0, *ends[:-1])
    return sum(
        any(t.bytes for t in problem.workload.tensors[start:end])
        for start, end in zip(starts, ends, strict=True)
    )


@st.composite
def problems(draw):
    number = draw(st.integers(1, 7))
    times = st.integers(0, 30).map(lambda t: t / 10)
    ready = sorted(draw(st.lists(times, min_size=number, max_size=number)))
    dtypes = st.sampled_from(("float32", "float32", "float32", "float16"))
    tensors = tuple(
        TensorSpec(
            name=f"t{i}",
            bytes=4 * draw(st.sampled_from((0, 1, 2, 5, 20))),
            dtype=draw(dtypes),
            ready_s=at_s,
            needed_s=0.0,
        )
        for i, at_s in enumerate(ready)
    )
    return FusionProblem(
        workload=Workload(
            name="problem",
            framework="none",
            device="none",
            batch_per_rank=1,
            forward_s=0.0,
            backward_s=3.0,
            tensors=tensors,
        ),
        cost=LinearCost(
            startup_s=draw(st.sampled_from((0.0, 0.1, 1.0))),
            s_per_byte=draw(st.sampled_from((0.0, 0.025, 0.25))),
        ),
    )


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_finish_is_the_least_over_all_fusions(problem) -> None:
    least = min(finish_of(problem, ends) for ends in all_fusions(problem.workload))
    assert problem.finish_s() == pytest.approx(least, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), later_s=st.sampled_from((0.0, 0.1, 1.0, 5.0)))
def test_no_fusion_meets_the_deadline_with_fewer_buckets(problem, later_s) -> None:
    deadline_s = problem.finish_s() + later_s
    ends = problem.fewest_buckets(deadline_s)
    fusions = list(all_fusions(problem.workload))
    assert ends in fusions
    assert finish_of(problem, ends) <= deadline_s + 1e-9
    fewest = min(
        sent_buckets(problem, other)
        for other in fusions
        if finish_of(problem, other) <= deadline_s + 1e-9
    )
    assert sent_buckets(problem, ends) == fewest


@pytest.mark.parametrize("seed", range(40))
def test_fusion_is_the_best_of_all_on_one_lane_when_simulated(
    seed, make_instance
) -> None:
    workload, cluster = make_instance(seed, tensors=7)
    model = StepModel(workload, cluster)
    best_s = min(
        model.iteration_s(ends, 1, (0,) * len(ends), (1,) * len(ends))
        for ends in all_fusions(workload)
    )
    plan = planners.get("fusion").plan(workload, cluster)
    assert plan.predicted.iteration_s == pytest.approx(best_s, rel=1e-9)


def test_greedy_waits_too_long_where_the_optimum_does_not(
    make_workload, make_cluster
) -> None:
    """MG-WFBP's counterexample: a = b = 1, sizes 10, 0, 0, ready 0, .9, 1.8."""
    # Two hosts: two steps of the ring at 0.5 s are a = 1 s; a byte crosses the wire
    # once, so b = 1 s per 1e6 bytes.
    cluster = make_cluster(
        hosts=2, latency_s=0.5, link_bytes_per_s=1e6, flow_bytes_per_s=None
    )
    workload = make_workload([10_000_000, 4, 4], [0.0, 0.9, 1.8])
    greedy = planners.get("mg-wfbp").plan(workload, cluster)
    exact = planners.get("fusion").plan(workload, cluster)
    assert [len(b.tensors) for b in greedy.buckets] == [3]
    assert [len(b.tensors) for b in exact.buckets] == [1, 2]
    assert greedy.predicted.iteration_s == pytest.approx(12.8, abs=1e-4)
    assert exact.predicted.iteration_s == pytest.approx(12.0, abs=1e-4)
