"""What a plan says of its distance to the best."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from stretto import _api, planners
from stretto.planners.base import CERTIFY_GAP, certified
from stretto.sim import lower_bound


def test_contention_is_certified_by_the_linear_program(make_instance) -> None:
    tightened = 0
    for seed in range(12):
        workload, cluster = make_instance(seed, tensors=8, contended=True)
        plan = planners.get("ddp").plan(workload, cluster)
        better = certified(plan, workload, cluster)
        assert better.predicted.iteration_s == plan.predicted.iteration_s
        assert better.digest == plan.digest
        assert better.predicted.lower_bound_s >= plan.predicted.lower_bound_s
        best = planners.get("joint", dims="all", robust=False).plan(workload, cluster)
        if best.overlap != "forward" and all(
            bucket.algorithm == "ring" for bucket in best.buckets
        ):
            reached = best.predicted.iteration_s
            assert better.predicted.lower_bound_s <= reached * (1 + 1e-9)
        if plan.predicted.gap > CERTIFY_GAP:
            bound = lower_bound(workload, cluster, certificate="lp")
            assert better.predicted.lower_bound_s == bound.value_s
            tightened += bound.value_s > plan.predicted.lower_bound_s * (1 + 1e-6)
    assert tightened >= 4


def test_without_contention_nothing_is_solved(make_instance, monkeypatch) -> None:
    workload, cluster = make_instance(3, tensors=8)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # importing it fails
    plan = _api.plan(workload, cluster, "ddp")
    assert plan == planners.get("ddp").plan(workload, cluster)


def test_a_plan_of_other_algorithms_has_their_bound(make_workload, make_cluster):
    workload = make_workload([4000] * 10, [0.001 * (i + 1) for i in range(10)])
    cluster = make_cluster(hosts=1024, latency_s=1e-4)
    ring = planners.get("joint").plan(workload, cluster).predicted
    every = planners.get("joint", dims="all").plan(workload, cluster).predicted
    assert every.iteration_s < ring.lower_bound_s
    assert every.lower_bound_s <= every.iteration_s


def test_contributions_never_rise(make_instance) -> None:
    workload, cluster = make_instance(5, tensors=8, contended=True)
    workload = replace(
        workload,
        tensors=tuple(
            replace(t, needed_s=workload.forward_s * (7 - i) / 8)
            for i, t in enumerate(workload.tensors)
        ),
    )
    rows = _api.contributions(workload, cluster)
    times = [step_s for _, step_s in rows]
    assert [name for name, _ in rows][:2] == ["fusion", "lanes"]
    assert times == sorted(times, reverse=True)
    every = planners.get("joint", dims="all", robust=False).plan(workload, cluster)
    assert times[-1] <= every.predicted.iteration_s * (1 + 1e-9)
    assert times[0] == pytest.approx(
        planners.get("joint", dims="fusion", robust=False)
        .plan(workload, cluster)
        .predicted.iteration_s
    )
