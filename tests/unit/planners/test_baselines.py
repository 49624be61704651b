"""The published rules against their sources."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from stretto import planners
from stretto.errors import Infeasible
from stretto.planners.aiacc import MAX_UNITS, lane_choices


def sizes_of(plan, workload) -> list[list[int]]:
    position = {t.name: i for i, t in enumerate(workload.tensors)}
    return [[position[name] for name in bucket.tensors] for bucket in plan.buckets]


@pytest.mark.parametrize("seed", range(20))
def test_ddp_builds_torch_s_buckets(seed, make_workload, make_cluster) -> None:
    rng = random.Random(seed)
    sizes = [4 * rng.choice((1, 7, 100, 256, 1000)) for _ in range(rng.randint(1, 40))]
    workload = make_workload(sizes, [0.001 * i for i in range(len(sizes))])
    first, cap = rng.choice((4, 1024, 2048)), rng.choice((4, 3000, 4096))
    tensors = [torch.empty(size // 4) for size in sizes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
    planner = planners.get("ddp", first_cap_bytes=first, cap_bytes=cap)
    assert sizes_of(planner.plan(workload, make_cluster()), workload) == theirs


@pytest.mark.parametrize("cap_mib", [None, 1, 5, 30])
def test_ddp_takes_the_caps_that_pytorch_takes(make_workload, make_cluster, cap_mib):
    from torch.nn.parallel.distributed import _BucketCapacityConfig

    theirs = _BucketCapacityConfig.create(cap_mib, None, False)
    caps = [theirs.first_bucket_bytes_cap, theirs.bucket_bytes_cap]
    sizes = [2**19] * 130
    workload = make_workload(sizes, [0.001 * i for i in range(len(sizes))])
    tensors = [torch.empty(size // 4) for size in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
    options = {} if cap_mib is None else {"cap_bytes": cap_mib * 2**20}
    plan = planners.get("ddp", **options).plan(workload, make_cluster())
    assert sizes_of(plan, workload) == expected


def test_ddp_default_caps_are_one_and_twenty_five_mib(
    make_workload, make_cluster
) -> None:
    mib = 2**20
    workload = make_workload([mib // 2] * 60, [0.001 * i for i in range(60)])
    plan = planners.get("ddp").plan(workload, make_cluster())
    assert [len(b.tensors) for b in plan.buckets] == [2, 50, 8]


def test_ddp_first_cap_is_never_above_the_cap(make_workload, make_cluster) -> None:
    workload = make_workload([1024] * 4, [0.0, 0.1, 0.2, 0.3])
    plan = planners.get("ddp", cap_bytes=1024).plan(workload, make_cluster())
    assert [len(b.tensors) for b in plan.buckets] == [1, 1, 1, 1]


def test_single_sends_nothing_before_backward_has_ended(
    make_workload, make_cluster
) -> None:
    workload = make_workload(
        [4_000_000, 4_000_000], [0.01, 0.02], forward_s=0.05, backward_s=0.1
    )
    plan = planners.get("single").plan(workload, make_cluster())
    assert plan.overlap == "none"
    # Ring over 4 hosts: 6 steps of 170 us, 1.5 wire bytes per byte, one 36 MB/s flow.
    alone_s = 6 * 1.7e-4 + 1.5 * 8e6 / 36e6
    assert plan.predicted.iteration_s == pytest.approx(0.15 + alone_s, rel=1e-9)
    assert plan.predicted.exposed_communication_s == pytest.approx(alone_s, rel=1e-9)


def test_horovod_fuses_what_is_ready_at_a_cycle(make_workload, make_cluster) -> None:
    ready = [0.001, 0.002, 0.004, 0.006, 0.009, 0.016]
    workload = make_workload([4] * 6, ready)
    cluster = make_cluster(latency_s=0.0)
    plan = planners.get("horovod", cycle_s=0.005).plan(workload, cluster)
    assert sizes_of(plan, workload) == [[0, 1, 2], [3, 4], [5]]


def test_horovod_never_overfills_its_buffer(make_workload, make_cluster) -> None:
    workload = make_workload([400, 400, 400, 2000, 400], [0.001] * 5)
    planner = planners.get("horovod", fusion_bytes=1000)
    plan = planner.plan(workload, make_cluster())
    assert sizes_of(plan, workload) == [[0, 1], [2], [3], [4]]


def test_horovod_gathers_while_a_cycle_s_collectives_run(
    make_workload, make_cluster
) -> None:
    ready = [0.005, *(0.006 + 0.005 * i for i in range(10))]
    workload = make_workload([3_600_000] + [4] * 10, ready)
    plan = planners.get("horovod").plan(workload, make_cluster())
    assert sizes_of(plan, workload) == [[0], list(range(1, 11))]


def test_aiacc_packs_small_gradients_and_cuts_large_ones(
    make_workload, make_cluster
) -> None:
    mib = 2**20
    sizes = [mib // 2, mib // 2, 3 * mib, mib // 4]
    workload = make_workload(sizes, [0.0, 0.01, 0.02, 0.03])
    planner = planners.get("aiacc", unit_bytes=mib, lanes=2)
    plan = planner.plan(workload, make_cluster())
    assert sizes_of(plan, workload) == [[0, 1], [2], [3]]
    assert [b.slices for b in plan.buckets] == [1, 3, 1]
    assert [b.lane for b in plan.buckets] == [0, 1, 0]


@pytest.mark.parametrize("seed", range(6))
def test_aiacc_is_the_best_of_its_grid(seed, make_instance) -> None:
    workload, cluster = make_instance(seed, tensors=12)
    chosen = planners.get("aiacc").plan(workload, cluster).predicted.iteration_s
    fixed = [
        planners.get("aiacc", unit_bytes=unit, lanes=lanes).plan(workload, cluster)
        for unit in (2**20, 2**22, 2**24, 2**26)
        for lanes in lane_choices(8)
    ]
    assert chosen == min(plan.predicted.iteration_s for plan in fixed)


@pytest.mark.parametrize("size", [10**13, 2**53])
def test_aiacc_cuts_a_huge_gradient_into_few_units(size, make_workload, make_cluster):
    workload = make_workload([4000, size, 12000], [0.0, 0.01, 0.02])
    plan = planners.get("aiacc").plan(workload, make_cluster())
    assert sum(bucket.slices for bucket in plan.buckets) <= MAX_UNITS + 3


def test_exhaustive_refuses_more_than_it_can_try(make_instance) -> None:
    workload, cluster = make_instance(0, tensors=9)
    with pytest.raises(Infeasible, match="at most 8 tensors"):
        planners.get("exhaustive").plan(workload, cluster)
