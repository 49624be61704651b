from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import ring_all_reduce_s
from stretto.schema import (
    Cluster,
    Link,
)
from stretto.sim import simulate_step
from stretto.sim.scaling import doubling_ranks, scaling
from stretto.testing import strategies as own
from support.instances import workload_of


def cluster(**changes):
    values = {
        "name": "c",
        "hosts": 8,
        "ranks_per_host": 1,
        "inter_host": Link(latency_s=1e-5, bandwidth_bytes_per_s=6.25e9),
        "intra_host": Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11),
    }
    return Cluster(**(values | changes))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_point_is_a_simulated_step_and_respects_its_bound(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    overlaps = ("none", "backward", "forward")
    one = data.draw(own.plans(work, on, overlaps=overlaps))
    (point,) = scaling(work, on, one, ranks=[on.ranks])
    expected = simulate_step(work, on, one)
    assert point.iteration_s == expected.iteration_s
    assert point.exposed_communication_s == expected.exposed_communication_s
    assert point.iteration_s >= point.bound_s * (1 - 1e-12)
    assert point.num_buckets == len(one.buckets)
    assert 0 <= point.efficiency_ratio <= 1 + 1e-12


@settings(max_examples=20, deadline=None)
@given(own.workloads())
def test_more_hosts_never_make_a_ring_on_one_lane_faster(work):
    on = cluster()
    choice = own.DrawnBuckets(
        ends=(len(work.tensors),), lanes=1, bucket_lanes=(0,), slices=(1,)
    )
    points = scaling(work, on, choice.plan(work, on))
    assert [p.ranks for p in points] == list(doubling_ranks(on))
    assert points[0].iteration_s == work.forward_s + work.backward_s
    for fewer, more in pairwise(points):
        assert fewer.iteration_s <= more.iteration_s * (1 + 1e-12)
    size = work.total_bytes
    if size:
        last = work.forward_s + max(
            work.backward_s,
            work.tensors[-1].ready_s + ring_all_reduce_s(size, 100_000, on.inter_host),
        )
        assert points[-1].ranks == 100_000
        assert points[-1].iteration_s == pytest.approx(last, rel=1e-12)


def test_ranks_double_within_a_host_and_then_hosts_do():
    assert doubling_ranks(cluster(ranks_per_host=4), max_ranks=50) == (
        1,
        2,
        4,
        8,
        16,
        32,
        48,
    )
    assert doubling_ranks(cluster(), max_ranks=8) == (1, 2, 4, 8)
    assert doubling_ranks(cluster(ranks_per_host=6), max_ranks=12) == (1, 2, 4, 6, 12)
    assert doubling_ranks(cluster())[-1] == 100_000


def test_a_plan_may_be_made_for_every_number_of_ranks():
    asked = []

    def planner(workload, on):
        asked.append(on.ranks)
        count = len(workload.tensors)
        return own.DrawnBuckets(
            ends=(count,), lanes=1, bucket_lanes=(0,), slices=(1,)
        ).plan(workload, on)

    points = scaling(one_tensor(), cluster(), planner, ranks=[2, 16])
    assert asked == [2, 16] == [p.ranks for p in points]


def one_tensor():
    return workload_of([(4096, 0.2)], dtype="float32", forward_s=0.1)
