"""Launch orders, and plans whose buckets continue during the next forward."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import planners
from stretto.errors import SpecError
from stretto.planners._joint.launch import (
    earliest_need_first,
    merged_order,
    other_orders,
    split_order,
    tidy,
)
from stretto.planners.base import Draft
from stretto.schema import TensorSpec, Workload
from stretto.sim import simulate_step
from stretto.testing.instances import build_cluster

FORWARD = ("fusion", "lanes", "slices", "forward")


def layered(*, layers=12, size_bytes=1_750_000, forward_s=0.087, backward_s=0.173):
    """Layers of equal size, needed in the opposite order of readiness."""
    return Workload(
        name="layers",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"layer{layers - 1 - i}.weight",
                bytes=size_bytes,
                dtype="float32",
                ready_s=0.999 * backward_s * (i + 1) / layers,
                needed_s=forward_s * (layers - 1 - i) / layers,
            )
            for i in range(layers)
        ),
    )


def with_any_needs(workload, rng):
    return replace(
        workload,
        tensors=tuple(
            replace(t, needed_s=rng.uniform(0.0, workload.forward_s))
            for t in workload.tensors
        ),
    )


@pytest.mark.parametrize(
    ("ready_s", "takes_s", "expected"),
    [
        pytest.param((0, 1, 2), (1, 1, 1), (0, 1, 2), id="a fast pipe: as ready"),
        pytest.param((0, 1, 2), (5, 5, 5), (0, 2, 1), id="the first needed goes ahead"),
        pytest.param((0, 0, 0), (5, 5, 5), (2, 1, 0), id="all ready: as needed"),
        pytest.param((0, 1, 9), (2, 2, 2), (0, 1, 2), id="the pipe does not wait"),
    ],
)
def test_one_pipe_sends_what_is_needed_first(ready_s, takes_s, expected):
    assert earliest_need_first(ready_s, (2, 1, 0), takes_s) == expected


@given(st.integers(1, 8), st.data())
def test_a_split_and_a_merge_restore_the_order(number, data):
    order = tuple(data.draw(st.permutations(range(number))))
    bucket = data.draw(st.integers(0, number - 1))
    order = tidy(order)
    assert merged_order(split_order(order, bucket), bucket) == order


@given(st.integers(2, 8), st.data())
def test_a_merged_order_names_each_bucket_once(number, data):
    order = tuple(data.draw(st.permutations(range(number))))
    bucket = data.draw(st.integers(0, number - 2))
    found = merged_order(tidy(order), bucket) or tuple(range(number - 1))
    assert sorted(found) == list(range(number - 1))


@given(st.integers(1, 6), st.data())
def test_a_bucket_goes_to_every_other_place_once(number, data):
    order = tuple(data.draw(st.permutations(range(number))))
    bucket = data.draw(st.integers(0, number - 1))
    draft = replace(Draft.in_turn(range(1, number + 1)), launch=tidy(order))
    found = [other.launch for other in other_orders(draft, bucket, every=True)]
    assert len(set(found)) == len(found) == number - 1
    rest = [b for b in order if b != bucket]
    for launch in found:
        full = launch or tuple(range(number))
        assert [b for b in full if b != bucket] == rest


def test_joint_is_near_brute_force_with_overlap_forward():
    excess = []
    for seed in range(8):
        rng = random.Random(seed)
        workload = layered(
            layers=rng.randint(2, 4),
            size_bytes=4 * rng.randint(50_000, 2_000_000),
            forward_s=rng.uniform(0.02, 0.1),
            backward_s=rng.uniform(0.02, 0.2),
        )
        workload = with_any_needs(workload, rng) if seed % 2 else workload
        options = {"max_lanes": 2, "dims": ("fusion", "lanes", "forward")}
        cluster = build_cluster()
        joint = planners.get("joint", robust=False, **options).plan(workload, cluster)
        best = planners.get("exhaustive", **options).plan(workload, cluster)
        limit_s = best.predicted.iteration_s
        excess.append(joint.predicted.iteration_s / limit_s - 1)
        assert joint.predicted.lower_bound_s <= limit_s * (1 + 1e-9)
    assert min(excess) > -1e-9
    assert statistics.mean(excess) < 1e-3


def test_joint_waits_for_a_bucket_that_is_needed_first_and_ready_a_moment_later():
    tensors = [("small", 2_000_000, 0.0090, 0.046), ("large", 9_000_000, 0.0091, 0.005)]
    workload = replace(
        layered(layers=2, forward_s=0.1, backward_s=0.01),
        tensors=tuple(
            TensorSpec(name=n, bytes=b, dtype="float32", ready_s=r, needed_s=f)
            for n, b, r, f in tensors
        ),
    )
    options = {"max_lanes": 1, "dims": FORWARD}
    plan = planners.get("joint", **options).plan(workload, build_cluster())
    assert plan.launch == (1, 0)


def test_forward_shortens_a_step_below_what_backward_alone_can_reach():
    workload, cluster = layered(), build_cluster()
    backward = planners.get("joint").plan(workload, cluster).predicted
    plan = planners.get("joint", dims=FORWARD).plan(workload, cluster)
    assert plan.overlap == "forward"
    assert plan.launch
    assert plan.predicted.iteration_s < 0.9 * backward.lower_bound_s
    again = simulate_step(workload, cluster, plan).iteration_s
    assert plan.predicted.iteration_s == pytest.approx(again, rel=1e-12)
    assert plan.predicted.bound_scope.endswith("with backward or the next forward")


def test_where_backward_hides_all_the_plan_is_one_of_backward():
    workload = layered(backward_s=2.0)
    plan = planners.get("joint", dims=FORWARD).plan(workload, build_cluster())
    assert plan.overlap == "backward"
    assert plan.predicted.gap < 0.02


def test_where_forward_needs_all_at_once_the_plan_is_one_of_backward():
    workload = layered()
    tensors = tuple(replace(t, needed_s=0.0) for t in workload.tensors)
    workload = replace(workload, tensors=tensors)
    plan = planners.get("joint", dims=FORWARD).plan(workload, build_cluster())
    assert plan.overlap == "backward"


def test_a_replan_keeps_a_good_forward_plan():
    workload, cluster = layered(), build_cluster()
    joint = planners.get("joint", dims=FORWARD)
    plan = joint.plan(workload, cluster)
    again = joint.replan(workload, cluster, [plan])
    assert again.predicted.iteration_s <= plan.predicted.iteration_s * 1.006


def test_brute_force_tries_every_launch_order():
    workload, cluster = layered(layers=3, size_bytes=5_000_000), build_cluster()
    best = planners.get("exhaustive", max_lanes=1, dims="fusion,forward")
    found = best.plan(workload, cluster).predicted.iteration_s
    one = planners.get("wfbp").plan(workload, cluster)
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        plan = replace(one, overlap="forward", launch=order)
        assert found <= simulate_step(workload, cluster, plan).iteration_s * (1 + 1e-9)


def test_dear_sends_halves_from_buckets_of_one_size():
    plan = planners.get("dear", fusion_bytes=4 << 20).plan(layered(), build_cluster())
    assert (plan.overlap, plan.lanes, plan.launch) == ("halves", 1, ())
    assert {len(bucket.tensors) for bucket in plan.buckets} == {3}
    assert "in halves" in plan.predicted.bound_scope


def test_dear_takes_the_fastest_size():
    workload, cluster = layered(), build_cluster()
    fastest = planners.get("dear").plan(workload, cluster).predicted.iteration_s
    for mib in (1, 2, 4, 8, 16, 64):
        one = planners.get("dear", fusion_bytes=mib << 20).plan(workload, cluster)
        assert fastest <= one.predicted.iteration_s * (1 + 1e-9)


def test_a_buffer_of_no_size_is_refused():
    with pytest.raises(SpecError, match="fusion_bytes must be > 0"):
        planners.get("dear", fusion_bytes=0)
