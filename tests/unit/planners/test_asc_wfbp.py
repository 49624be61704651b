"""ASC-WFBP's rules: errors in the printed algorithm, a counterexample, and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import planners, zoo
from stretto.planners.asc_wfbp import (
    NORMAL,
    SIMULTANEOUS,
    determine_groups,
    penalty_s,
    printed_groups,
)
from stretto.planners.base import Draft, LinearCost, finish
from stretto.schema import AllReduceFit

UNIT_BYTES = 800_000
UNIT_COST = LinearCost(startup_s=1.0, s_per_byte=1 / UNIT_BYTES)


@pytest.fixture
def unit_cluster(make_cluster):
    """A start-up of 1 s, a unit a second, two flows at two thirds of that each."""
    cluster = make_cluster(
        link_bytes_per_s=100 * UNIT_BYTES, flow_bytes_per_s=None, gamma=(1.0, 1.5)
    )
    fit = AllReduceFit(startup_s=1.0, s_per_byte=1 / UNIT_BYTES, ranks=cluster.ranks)
    return replace(cluster, allreduce=fit)


def units(*values: float) -> list[int]:
    return [int(value * UNIT_BYTES) for value in values]


def test_theorem_1_does_not_hold(make_workload, unit_cluster) -> None:
    sizes, ready = units(8.5, 6, 1), [0.0, 0.0, 10.0]
    workload = make_workload(sizes, ready)
    # With the first gradient sent, the rules merge the second into the third.
    groups = determine_groups(ready, sizes, UNIT_COST, 1.5, firsts=[0, 1, 1])
    assert [group.end for group in groups] == [1, 3]

    def simulated_s(ends, lanes) -> float:
        draft = Draft(ends=ends, slices=(1,) * len(ends), bucket_lanes=lanes, lanes=2)
        plan = finish(draft, "x", workload, unit_cluster)
        return plan.predicted.iteration_s

    assert simulated_s((1, 3), (0, 0)) == pytest.approx(18.0)
    assert simulated_s((1, 2, 3), (0, 1, 0)) == pytest.approx(14.5)
    assert simulated_s((1, 2, 3), (0, 1, 1)) == pytest.approx(13.0)


def test_q1_asks_when_the_next_gradient_is_ready() -> None:
    cost = LinearCost(startup_s=1.0, s_per_byte=1.0)
    arguments = ([5.0, 8.0], [1.0, 1.0], cost, 1.5)
    assert determine_groups(*arguments)[0].end_s == 7.0
    assert determine_groups(*arguments)[0].kind == NORMAL
    assert printed_groups(*arguments)[0].kind == SIMULTANEOUS  # 7 <= 3


def test_a_small_message_loses_little_beside_a_large_one() -> None:
    cost = LinearCost(startup_s=0.0, s_per_byte=1.7e-9)
    printed_s = penalty_s(1e3, 1e8, 0.0, cost, 1.5, capped=False)
    assert printed_s == pytest.approx(85e-3)
    assert penalty_s(1e3, 1e8, 0.0, cost, 1.5) == pytest.approx(0.85e-6)
    # Half of the running message is left, all of it, none.
    assert penalty_s(1e9, 1e8, 85e-3, cost, 1.5) == pytest.approx(42.5e-3)
    assert penalty_s(1e9, 1e8, 0.3, cost, 1.5) == 0.0
    assert penalty_s(1e9, 0.0, 0.3, cost, 1.5) == 0.0


def test_a_normal_group_waits_for_the_one_before() -> None:
    """Definition 1; printed, it starts when it is ready, whatever runs."""
    cost = LinearCost(startup_s=0.1, s_per_byte=1.0)
    arguments = ([0.0, 2.0, 20.0], [5.0, 1.0, 1.0], cost, 1.5)
    right, printed = determine_groups(*arguments), printed_groups(*arguments)
    assert [group.start_s for group in right] == pytest.approx([0.0, 5.1, 20.0])
    assert [group.start_s for group in printed] == [0.0, 2.0, 20.0]


def test_groups_on_the_other_lane_are_those_sent_at_once(
    make_workload, unit_cluster
) -> None:
    workload = make_workload(units(5, 3, 1), [0.0, 2.0, 7.2])
    plan = planners.get("asc-wfbp").plan(workload, unit_cluster)
    assert [b.lane for b in plan.buckets] == [0, 1, 0]
    assert plan.lanes == 2


def test_gradients_that_never_meet_need_one_lane(make_workload, unit_cluster) -> None:
    workload = make_workload(units(1, 1, 1), [0.0, 5.0, 10.0])
    plan = planners.get("asc-wfbp").plan(workload, unit_cluster)
    assert plan.lanes == 1
    assert len(plan.buckets) == 3


PUBLISHED = {
    # Step time and groups, from published a, b and gamma = 1.5.
    "resnet152": (0.499, 4),
    "densenet201": (0.230, 3),
    "inception-v4": (0.364, 3),
    "bert-base": (0.857, 5),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_papers_models_are_reproduced(model) -> None:
    """Layer times are by roofline, so 2 % and one group are allowed."""
    workload, cluster = zoo.workload(model), zoo.cluster("asc-uncapped")
    plan = planners.get("asc-wfbp").plan(workload, cluster)
    iteration_s, groups = PUBLISHED[model]
    assert plan.predicted.iteration_s == pytest.approx(iteration_s, rel=0.02)
    assert abs(len(plan.buckets) - groups) <= 1


def test_the_printed_rules_send_too_much_at_once() -> None:
    """Faster than the link allows by the print's own count: gamma = 1.5 holds for two
    flows, and it has many under way.
    """
    workload, cluster = zoo.workload("resnet152"), zoo.cluster("asc-uncapped")
    plan = planners.get("asc-wfbp", literal=True).plan(workload, cluster)
    assert 40 <= len(plan.buckets) <= 70
    link_bound_s = workload.forward_s + 0.407
    sent = [t for t in workload.tensors if t.bytes]
    groups = printed_groups(
        [t.ready_s for t in sent],
        [t.bytes for t in sent],
        LinearCost(startup_s=1.4e-3, s_per_byte=1.7e-9),
        1.5,
    )
    assert workload.forward_s + max(g.end_s for g in groups) < link_bound_s
