from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import all_reduce_s
from stretto.schema import (
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    RateCurve,
)
from stretto.schema.plan import ALGORITHMS
from stretto.sim import lower_bound, simulate_step
from stretto.testing import strategies as own
from support.instances import one_link, workload_of


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_plan_beats_the_bound(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters())
    one = data.draw(own.plans(work, on))
    bound = lower_bound(work, on)
    assert bound.value_s == max(bound.compute_s, bound.cut_s, bound.link_s)
    assert simulate_step(work, on, one).iteration_s >= bound.value_s * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_plan_of_any_algorithm_beats_the_bound_over_all(data):
    work = data.draw(own.workloads())
    on = data.draw(own.clusters(min_hosts=2))
    one = data.draw(own.plans(work, on, algorithms=ALGORITHMS))
    bound = lower_bound(work, on, algorithms=ALGORITHMS)
    assert bound.value_s <= lower_bound(work, on).value_s * (1 + 1e-12)
    assert simulate_step(work, on, one).iteration_s >= bound.value_s * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_one_tensor_alone_on_an_uncapped_link_reaches_the_bound(data):
    work = data.draw(own.workloads(max_tensors=1, min_elements=1))
    on = data.draw(
        own.clusters(min_hosts=2, fitted=False, concurrent=False, contended=False)
    )
    free = Link(
        latency_s=on.inter_host.latency_s,
        bandwidth_bytes_per_s=on.inter_host.bandwidth_bytes_per_s,
    )
    on = Cluster(
        name="free",
        hosts=on.hosts,
        ranks_per_host=on.ranks_per_host,
        inter_host=free,
        intra_host=on.intra_host,
    )
    one = own.DrawnBuckets(ends=(1,), lanes=1, bucket_lanes=(0,), slices=(1,))
    result = simulate_step(work, on, one.plan(work, on))
    assert result.iteration_s == pytest.approx(lower_bound(work, on).value_s, rel=1e-12)


def one_burst(elements=2 * 10**6):
    return workload_of([(4 * elements, 0.2)], dtype="float32", forward_s=0.1)


def test_enough_slices_of_capped_flows_reach_the_bound():
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8, stream_bytes_per_s=3e7)
    on = one_link(link, hosts=4)
    work = one_burst()
    spread = own.DrawnBuckets(ends=(1,), lanes=4, bucket_lanes=(0,), slices=(4,))
    bound = lower_bound(work, on)
    reached = simulate_step(work, on, spread.plan(work, on)).iteration_s
    assert reached == pytest.approx(bound.value_s, rel=1e-12)
    alone = own.DrawnBuckets(ends=(1,), lanes=1, bucket_lanes=(0,), slices=(1,))
    capped = simulate_step(work, on, alone.plan(work, on)).iteration_s
    assert capped == pytest.approx(0.3 + all_reduce_s(8 * 10**6, on), rel=1e-12)


def test_flows_that_never_fill_the_link_tighten_the_cut():
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9, stream_bytes_per_s=1e8)
    on = one_link(link, concurrency=Concurrency(gamma=(1.0, 1.0, 2.0)))
    bound = lower_bound(one_burst(), on)
    # Two at once reach 2e8 together, three and more 1.5e8.
    assert bound.cut_s == pytest.approx(0.3 + 8e6 / 2e8, rel=1e-12)
    assert bound.link_s == pytest.approx(0.3 + 8e6 / 1e9, rel=1e-12)


def test_contention_binds_by_the_faster_curve_at_the_greatest_resource():
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9, stream_bytes_per_s=1e8)
    slow = RateCurve(gamma1=4e7, gamma2=0.0, gamma3=0.0, gamma4=0.0)
    fast = RateCurve(gamma1=6e7, gamma2=3e7, gamma3=1.0, gamma4=1.0)
    on = one_link(
        link,
        concurrency=Concurrency(gamma=(1.0, 1.0, 4.0)),
        contention=Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=0.0),
            overlapped=slow,
            exclusive=fast,
            resources=(1, 1000),
        ),
    )
    work = one_burst()
    bound = lower_bound(work, on)
    # After computation two flows reach 6e7 each; three and more 7.5e7 together.
    assert bound.cut_s == pytest.approx(0.3 + 8e6 / 1.2e8, rel=1e-9)
    halves = own.DrawnBuckets(ends=(1,), lanes=2, bucket_lanes=(0,), slices=(2,))
    one = halves.plan(work, on)
    one = replace(one, buckets=(replace(one.buckets[0], resource=1000),))
    reached = simulate_step(work, on, one).iteration_s
    assert reached == pytest.approx(bound.value_s, rel=1e-9)


def test_one_rank_is_bound_by_computation():
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    on = one_link(link, hosts=1)
    assert lower_bound(one_burst(), on).value_s == pytest.approx(0.3, rel=1e-12)
