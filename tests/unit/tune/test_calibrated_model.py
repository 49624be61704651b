"""What a search believes of its model, and what it plans by it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.sim.step import simulate_step
from stretto.tune.calibration import (
    DOUBT_RATIO,
    MAX_BOUND_DOUBT_RATIO,
    CalibratedModel,
)

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload


@pytest.fixture
def slower(cluster: Cluster) -> Cluster:
    """The same cluster with three quarters of its link and much dearer start-ups."""
    wire, fit = cluster.inter_host, cluster.allreduce
    assert fit is not None
    return replace(
        cluster,
        inter_host=replace(
            wire, bandwidth_bytes_per_s=0.75 * wire.bandwidth_bytes_per_s
        ),
        allreduce=replace(fit, startup_s=2 * fit.startup_s),
    )


def taught(workload: Workload, cluster: Cluster, truth: Cluster) -> CalibratedModel:
    """A calibrated model that has seen three plans' steps on the true cluster."""
    model = CalibratedModel(workload, cluster)
    first = planners.get("joint").plan(workload, cluster)
    points = model.space.points
    plans = [first, *(model.plan_of(points[i]) for i in (2, len(points) // 2))]
    for plan in plans:
        step = simulate_step(workload, truth, plan)
        model.learn(plan, step.iteration_s, step.timeline)
    return model


def replanned(
    workload: Workload, cluster: Cluster, slower: Cluster
) -> tuple[CalibratedModel, Plan]:
    """Return a model that has learned, and the plan that it makes then."""
    model = taught(workload, cluster, slower)
    plan = model.replan()
    assert plan is not None
    return model, plan


def test_a_second_plan_is_as_good_as_one_for_the_true_network(
    workload: Workload, cluster: Cluster, slower: Cluster
) -> None:
    _, again = replanned(workload, cluster, slower)
    for_truth = planners.get("joint").plan(workload, slower)
    reached_s = simulate_step(workload, slower, again).iteration_s
    # The corrected model is near the truth, not the truth.
    assert reached_s <= 1.01 * simulate_step(workload, slower, for_truth).iteration_s
    assert again.predicted is not None
    assert again.predicted.iteration_s == pytest.approx(reached_s, rel=0.03)


def test_nothing_is_planned_where_no_plan_can_be_faster(
    workload: Workload, cluster: Cluster, slower: Cluster
) -> None:
    model, plan = replanned(workload, cluster, slower)
    assert plan.predicted is not None
    bound_s = plan.predicted.lower_bound_s
    assert model.replan(below_s=0.999 * bound_s) is None
    above = model.replan(below_s=1.001 * bound_s)
    assert above is not None
    # It begins from the plan before, so it never falls behind that.
    assert above.predicted is not None
    assert above.predicted.iteration_s <= plan.predicted.iteration_s * (1 + 1e-9)


def test_one_wrong_prediction_is_not_forgotten_over_many_right_ones(
    workload: Workload, cluster: Cluster
) -> None:
    model = CalibratedModel(workload, cluster)
    plans = [model.plan_of(point) for point in model.space.points[:7]]
    bound_s, predicted_s = model.bound_s, model.plan_s(plans[0])
    assert model.floor_s(plans[0]) == pytest.approx(predicted_s / (1 + DOUBT_RATIO))

    assert model.compare(plans[0], 2 * predicted_s) == pytest.approx(-0.5)
    for plan in plans[1:]:
        assert model.compare(plan, model.plan_s(plan)) == pytest.approx(0.0)

    assert model.doubt_ratio == pytest.approx(0.5)
    assert model.floor_s(plans[0]) == pytest.approx(predicted_s / 1.5)
    assert model.bound_s == pytest.approx(bound_s / (1 + MAX_BOUND_DOUBT_RATIO))


def test_the_bound_counts_the_lanes_that_a_search_may_use(
    workload: Workload, cluster: Cluster
) -> None:
    bounds_s = []
    for max_lanes in (1, 2, 8):
        joint = planners.get("joint", max_lanes=max_lanes)
        plan = joint.plan(workload, cluster)
        assert plan.predicted is not None
        bounds_s.append(CalibratedModel(workload, cluster, max_lanes=max_lanes).bound_s)
        assert bounds_s[-1] == pytest.approx(plan.predicted.lower_bound_s)
    # One flow reaches less than a third of the link here.
    assert bounds_s[0] > 1.5 * bounds_s[1] > 1.5 * bounds_s[2]
