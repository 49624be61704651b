"""Planning where gradients of several types alternate."""

from __future__ import annotations

import random

import pytest

from stretto import planners
from stretto.planners._orders import views
from stretto.planners.ddp import CAP_BYTES, FIRST_CAP_BYTES
from stretto.sim.step import simulate_step

NARROW, WIDE = "bfloat16", "float32"
MIB = 2**20


@pytest.fixture
def transformer(make_workload):
    """Alternating norms and matrices: 60 runs of one type, ready at an even pace."""
    sizes = [4096, 2 * MIB] * 30
    ready_s = [0.2 * (i + 1) / 60 for i in range(60)]
    return make_workload(sizes, ready_s, dtypes=[WIDE, NARROW] * 30, forward_s=0.05)


def drawn(seed: int, make_workload):
    """Tensors of two or three types in random order and of random sizes."""
    rng = random.Random(seed)
    number = rng.randint(4, 40)
    types = [WIDE, NARROW, "float16"][: rng.randint(2, 3)]
    ready_s = sorted(rng.uniform(0.0, 0.2) for _ in range(number))
    sizes = [4 * int(2 ** rng.uniform(4, 21)) for _ in range(number)]
    dtypes = [rng.choice(types) for _ in range(number)]
    return make_workload(sizes, ready_s, dtypes=dtypes, forward_s=0.02)


def fill_order(workload, first: int, cap: int) -> list[list[str]]:
    """PyTorch's rule, bucket by bucket: full ones first, then what stayed open."""
    caps, held, size, out = {}, {}, {}, []
    for tensor in workload.tensors:
        held.setdefault(tensor.dtype, []).append(tensor.name)
        size[tensor.dtype] = size.get(tensor.dtype, 0) + tensor.bytes
        if size[tensor.dtype] >= caps.setdefault(tensor.dtype, first):
            out.append(held.pop(tensor.dtype))
            size[tensor.dtype], caps[tensor.dtype] = 0, cap
    return out + sorted(held.values(), key=lambda names: int(names[-1][1:]))


@pytest.mark.parametrize("seed", range(12))
def test_ddp_keeps_one_bucket_open_for_each_type(
    seed, make_workload, make_cluster
) -> None:
    workload = drawn(seed, make_workload)
    planner = planners.get("ddp", first_cap_bytes=2**16, cap_bytes=2 * MIB)
    plan = planner.plan(workload, make_cluster())
    if len(views(workload, (2**16, 2 * MIB))) > 1:
        expected = fill_order(workload, 2**16, 2 * MIB)
        assert [list(bucket.tensors) for bucket in plan.buckets] == expected
    plan.check_matches(workload)


@pytest.mark.parametrize("dims", ["fusion,lanes,slices", "lanes,slices", "fusion"])
@pytest.mark.parametrize("seed", range(8))
def test_joint_is_never_slower_than_another_planner(
    seed, dims, make_workload, make_cluster
) -> None:
    workload, cluster = drawn(seed, make_workload), make_cluster()
    joint = planners.get("joint", dims=dims)
    plan = joint.plan(workload, cluster)
    plan.check_matches(workload)
    types = {tensor.name: tensor.dtype for tensor in workload.tensors}
    for bucket in plan.buckets:
        assert {types[name] for name in bucket.tensors} == {bucket.wire_dtype}
    step_s = simulate_step(workload, cluster, plan).iteration_s
    assert plan.predicted.iteration_s == step_s
    assert plan.predicted.lower_bound_s <= step_s * (1 + 1e-9)
    others = ["ddp"]
    if "fusion" in dims:
        others += ["single", "wfbp", "mg-wfbp", "fusion"]
    for name in others:
        other = planners.get(name).plan(workload, cluster).predicted
        assert step_s <= other.iteration_s * (1 + 1e-9), name
    if "fusion" not in dims:
        ddp = planners.get("ddp").plan(workload, cluster)
        held = [bucket.tensors for bucket in ddp.buckets]
        assert [bucket.tensors for bucket in plan.buckets] == held


def test_norms_between_matrices_do_not_cut_buckets(transformer, make_cluster) -> None:
    cluster = make_cluster(link_bytes_per_s=1.2e9, flow_bytes_per_s=4e8)
    ddp = planners.get("ddp").plan(transformer, cluster)
    joint = planners.get("joint").plan(transformer, cluster)
    assert joint.predicted.iteration_s < ddp.predicted.iteration_s
    # In the order of readiness there are 60 runs of one type.
    assert len(joint.buckets) < 30
    again = planners.get("joint").replan(transformer, cluster, [joint])
    assert again.predicted.iteration_s <= 1.005 * joint.predicted.iteration_s
    assert len(again.buckets) < 30


def test_orders_keep_every_tensor_and_delay_none_of_them_less(transformer) -> None:
    found = views(transformer, (FIRST_CAP_BYTES, CAP_BYTES))
    assert found[0] is transformer
    assert len(found) > 2
    ready_s = {tensor.name: tensor.ready_s for tensor in transformer.tensors}
    for view in found:
        assert {tensor.name for tensor in view.tensors} == set(ready_s)
        assert all(tensor.ready_s >= ready_s[tensor.name] for tensor in view.tensors)
