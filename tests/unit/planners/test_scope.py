"""What a printed bound covers: whatever was open, and nothing less."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from stretto import _api, planners, zoo
from stretto.planners.joint import DIMS

COMBINATIONS = [
    dims
    for number in range(1, len(DIMS) + 1)
    for dims in itertools.combinations(DIMS, number)
]


@pytest.mark.parametrize("first", range(0, 4 * len(COMBINATIONS), 36))
def test_no_plan_in_the_open_dimensions_beats_the_bound(first, make_instance) -> None:
    for seed in range(first, first + 36):
        rng = random.Random(seed)
        dims = COMBINATIONS[seed % len(COMBINATIONS)]
        costly = {"resource", "algorithm", "forward"}.intersection(dims)
        workload, cluster = make_instance(
            seed, tensors=rng.randint(1, 2 if costly else 4), contended=seed % 3 > 0
        )
        forward_s = workload.forward_s
        workload = replace(
            workload,
            tensors=tuple(
                replace(t, needed_s=rng.uniform(0.0, forward_s))
                for t in workload.tensors
            ),
        )
        cluster = replace(cluster, ranks_per_host=rng.choice((1, 1, 2)))
        options = {"max_lanes": rng.choice((1, 2, 3)), "dims": dims}
        joint = _api.plan(workload, cluster, robust=rng.random() < 0.5, **options)
        best = planners.get("exhaustive", **options).plan(workload, cluster)
        limit_s = best.predicted.iteration_s * (1 + 1e-9)
        assert joint.predicted.lower_bound_s <= limit_s, (seed, dims)
        assert best.predicted.lower_bound_s <= limit_s, (seed, dims)
        assert joint.predicted.gap >= -1e-9


def test_the_bound_covers_algorithms_that_were_open_but_not_chosen() -> None:
    workload = zoo.workload("resnet50")
    cluster = zoo.cluster("mg-wfbp-10gbe-16")
    options = {"dims": "fusion,lanes,slices,algorithm"}
    default = _api.plan(workload, cluster, **options).predicted
    fastest = _api.plan(workload, cluster, robust=False, **options).predicted
    assert default.bound_scope == fastest.bound_scope
    assert default.lower_bound_s == fastest.lower_bound_s
    assert default.lower_bound_s <= fastest.iteration_s * (1 + 1e-9)
    # It took rings, and was printed as optimal with halving-doubling open.
    assert default.gap > 1e-3
    assert "ring, halving-doubling or tree" in default.bound_scope


@pytest.mark.parametrize("contended", [False, True])
def test_the_fastest_is_never_slower_than_the_default(contended, make_instance) -> None:
    for seed in range(16):
        workload, cluster = make_instance(seed, tensors=24, contended=contended)
        for dims in ("fusion,lanes,slices", "all"):
            if seed % 4 and dims == "all":
                continue
            default, fastest = (
                planners.get("joint", dims=dims, robust=robust)
                .plan(workload, cluster)
                .predicted.iteration_s
                for robust in (True, False)
            )
            assert fastest <= default * (1 + 1e-9), (seed, dims)


def test_fewer_lanes_give_a_bound_of_their_own(make_workload, make_cluster) -> None:
    # One flow reaches a third of the link, so one lane can't do what four can.
    workload = make_workload([4_000_000] * 6, [0.01 * (i + 1) for i in range(6)])
    cluster = make_cluster(flow_bytes_per_s=39e6)
    wide = _api.plan(workload, cluster).predicted
    narrow = _api.plan(workload, cluster, max_lanes=1).predicted
    assert narrow.lower_bound_s > wide.lower_bound_s * 1.5
    assert narrow.gap < 0.05
    assert narrow.bound_scope.endswith("on at most 1 lane")
    assert wide.bound_scope == "ring all-reduces overlapped with backward"


def test_a_bound_says_in_which_type_gradients_travel(
    make_workload, make_cluster
) -> None:
    workload = make_workload([4_000_000] * 6, [0.01 * (i + 1) for i in range(6)])
    plan = _api.plan(workload, make_cluster(), wire_dtype="bfloat16")
    assert plan.predicted.bound_scope.endswith(" in bfloat16")
    again = _api.with_prediction(plan, workload, make_cluster())
    assert again.predicted.bound_scope == plan.predicted.bound_scope
    assert again.predicted.lower_bound_s == pytest.approx(plan.predicted.lower_bound_s)
