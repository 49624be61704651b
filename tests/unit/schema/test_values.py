"""What a value must be, wherever it is built."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import PlanMismatch, SpecError
from stretto.schema import (
    Bucket,
    Cluster,
    Concurrency,
    Contention,
    Link,
    Plan,
    RateCurve,
    Span,
    TensorSpec,
    Timeline,
    Workload,
    model_digest,
    slice_bounds,
    tensors_digest,
)
from stretto.schema.cluster import ComputeContention
from stretto.testing import strategies as drawn


def tensor(name="t", **other):
    figures = {"bytes": 8, "dtype": "float32", "ready_s": 0.0, "needed_s": 0.0}
    return TensorSpec(**({"name": name} | figures | other))


def workload(*tensors, **other):
    figures = {
        "name": "m",
        "framework": "f",
        "device": "d",
        "batch_per_rank": 1,
        "forward_s": 1.0,
        "backward_s": 2.0,
        "tensors": tensors or (tensor(),),
    }
    return Workload(**(figures | other))


def plan(*buckets, **other):
    figures = {
        "planner": "p",
        "workload_digest": "sha256:0",
        "ranks": 2,
        "overlap": "backward",
        "lanes": 2,
        "buckets": buckets or (Bucket(tensors=("t",), wire_dtype="float32"),),
    }
    return Plan(**(figures | other))


def forward_plan(*launch, overlap="forward"):
    buckets = [Bucket(tensors=(name,), wire_dtype="float32") for name in "abc"]
    return plan(*buckets, overlap=overlap, launch=launch)


LINK = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
CURVE = RateCurve(gamma1=2.0, gamma2=1.0, gamma3=0.1, gamma4=0.5)

BROKEN = {
    "a tensor of half an element": (lambda: tensor(bytes=6), ".bytes"),
    "negative bytes": (lambda: tensor(bytes=-4), ".bytes"),
    "an unknown dtype": (lambda: tensor(dtype="float31"), ".dtype"),
    "a blank tensor name": (lambda: tensor(" "), ".name"),
    "ready before backward": (lambda: tensor(ready_s=-1e-9), ".ready_s"),
    "ready never": (lambda: tensor(ready_s=math.inf), ".ready_s"),
    "needed at no time": (lambda: tensor(needed_s=math.nan), ".needed_s"),
    "no tensors": (lambda: workload(tensors=()), ".tensors"),
    "no batch": (lambda: workload(batch_per_rank=0), ".batch_per_rank"),
    "a tensor twice": (
        lambda: workload(tensor("a"), tensor("b"), tensor("a")),
        ".tensors[2].name",
    ),
    "tensors out of order": (
        lambda: workload(tensor("a", ready_s=1.0), tensor("b", ready_s=0.5)),
        ".tensors[1].ready_s",
    ),
    "ready after backward": (
        lambda: workload(tensor("a", ready_s=2.5)),
        ".tensors[0].ready_s",
    ),
    "needed after forward": (
        lambda: workload(tensor("a", needed_s=1.5)),
        ".tensors[0].needed_s",
    ),
    "a link without bandwidth": (
        lambda: Link(latency_s=0.0, bandwidth_bytes_per_s=0.0),
        ".bandwidth_bytes_per_s",
    ),
    "a flow that never moves": (
        lambda: Link(**LINK, stream_bytes_per_s=0.0),
        ".stream_bytes_per_s",
    ),
    "no gamma": (lambda: Concurrency(gamma=()), ".gamma"),
    "a first gamma that is not 1": (lambda: Concurrency(gamma=(1.1,)), ".gamma[0]"),
    "a first gamma that is no number": (
        lambda: Concurrency(gamma=(math.nan,)),
        ".gamma[0]",
    ),
    "a gamma that falls": (lambda: Concurrency(gamma=(1.0, 2.0, 1.5)), ".gamma[2]"),
    "a gamma that no sum can hold": (
        lambda: Concurrency(gamma=(1.0, 1e308)),
        ".gamma[1]",
    ),
    "a bandwidth near 0": (
        lambda: Link(**LINK | {"bandwidth_bytes_per_s": 1e-320}),
        ".bandwidth_bytes_per_s",
    ),
    "resources that do not ascend": (
        lambda: Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=0.0),
            overlapped=CURVE,
            exclusive=CURVE,
            resources=(2, 2),
        ),
        ".resources[1]",
    ),
    "no hosts": (
        lambda: Cluster(
            name="c",
            hosts=0,
            ranks_per_host=1,
            inter_host=Link(**LINK),
            intra_host=Link(**LINK),
        ),
        ".hosts",
    ),
    "an empty bucket": (lambda: Bucket(tensors=(), wire_dtype="float32"), ".tensors"),
    "no slices": (
        lambda: Bucket(tensors=("t",), slices=0, wire_dtype="float32"),
        ".slices",
    ),
    "an unknown algorithm": (
        lambda: Bucket(tensors=("t",), algorithm="star", wire_dtype="float32"),
        ".algorithm",
    ),
    "an unknown wire type": (
        lambda: Bucket(tensors=("t",), wire_dtype="int8"),
        ".wire_dtype",
    ),
    "no buckets": (lambda: plan(buckets=()), ".buckets"),
    "an unknown overlap": (lambda: plan(overlap="sideways"), ".overlap"),
    "a launch order during backward alone": (
        lambda: forward_plan(2, 1, 0, overlap="backward"),
        ".launch",
    ),
    "a launch order of halves": (
        lambda: forward_plan(2, 1, 0, overlap="halves"),
        ".launch",
    ),
    "a launch order that repeats a bucket": (lambda: forward_plan(1, 1, 0), ".launch"),
    "a launch order that leaves one out": (lambda: forward_plan(1, 0), ".launch"),
    "a launch order beyond the last bucket": (
        lambda: forward_plan(3, 0, 1),
        ".launch",
    ),
    "a launch order below the first bucket": (
        lambda: forward_plan(-1, 0, 1),
        ".launch",
    ),
    "a lane that the plan lacks": (
        lambda: plan(Bucket(tensors=("t",), lane=2, wire_dtype="float32")),
        ".buckets[0].lane",
    ),
    "a tensor in two buckets": (
        lambda: plan(
            Bucket(tensors=("a", "b"), wire_dtype="float32"),
            Bucket(tensors=("c", "a"), wire_dtype="float32"),
        ),
        ".buckets[1].tensors[1]",
    ),
    "a span that ends before it starts": (
        lambda: Span(track="compute", name="x", start_s=1.0, end_s=0.5),
        ".end_s",
    ),
    "a span on no track": (
        lambda: Span(track="", name="x", start_s=0.0, end_s=0.5),
        ".track",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_values_are_refused_at_their_place(case):
    build, place = BROKEN[case]
    with pytest.raises(SpecError) as caught:
        build()
    assert caught.value.place == place


@given(data=st.data(), one=drawn.workloads(max_tensors=6))
def test_the_digest_is_of_the_model_and_not_of_times_or_order(data, one):
    slower = dataclasses.replace(
        one,
        forward_s=2 * one.forward_s + 1,
        backward_s=2 * one.backward_s,
        batch_per_rank=99,
        name="other",
        tensors=tuple(
            dataclasses.replace(t, ready_s=2 * t.ready_s, needed_s=0.0)
            for t in one.tensors
        ),
    )
    assert slower.digest == one.digest
    rows = [(t.name, t.bytes, t.dtype) for t in one.tensors]
    order = data.draw(st.permutations(rows))
    assert model_digest(order) == one.digest
    assert (tensors_digest(order) == one.ordered_digest) == (order == rows)
    i = data.draw(st.integers(0, len(rows) - 1))
    name, size_bytes, dtype = rows[i]
    for other in (
        (f"{name}x", size_bytes, dtype),
        (name, size_bytes + 4, dtype),
        (name, size_bytes, "int32"),
    ):
        assert model_digest([*rows[:i], other, *rows[i + 1 :]]) != one.digest


def test_a_launch_order_is_part_of_the_digest():
    orders = [forward_plan(), forward_plan(1, 0, 2), forward_plan(2, 0, 1)]
    assert len({one.digest for one in orders}) == len(orders)


def test_the_order_of_the_buckets_may_be_left_out():
    left_out, given_too = forward_plan(), forward_plan(0, 1, 2)
    assert left_out.launch_order == given_too.launch_order == (0, 1, 2)
    assert left_out.digest == given_too.digest


def test_a_plans_digest_is_of_what_it_does():
    def bucket(**other):
        return Bucket(**({"tensors": ("a", "b"), "wire_dtype": "float32"} | other))

    one = plan(bucket(), Bucket(tensors=("c",), wire_dtype="float32"))
    same = dataclasses.replace(one, planner="other")
    assert same.digest == one.digest
    others = [
        plan(bucket(), Bucket(tensors=("c",), wire_dtype="float32"), ranks=3),
        plan(bucket(), Bucket(tensors=("c",), wire_dtype="float32"), lanes=3),
        plan(bucket(), Bucket(tensors=("c",), wire_dtype="float32"), overlap="none"),
        plan(
            bucket(),
            Bucket(tensors=("c",), wire_dtype="float32"),
            workload_digest="sha256:1",
        ),
        plan(bucket(tensors=("b", "a")), Bucket(tensors=("c",), wire_dtype="float32")),
        plan(Bucket(tensors=("c",), wire_dtype="float32"), bucket()),
        plan(bucket(tensors=("a",)), Bucket(tensors=("b", "c"), wire_dtype="float32")),
        plan(bucket(lane=1), Bucket(tensors=("c",), wire_dtype="float32")),
        plan(bucket(slices=2), Bucket(tensors=("c",), wire_dtype="float32")),
        plan(bucket(resource=4), Bucket(tensors=("c",), wire_dtype="float32")),
        plan(bucket(algorithm="tree"), Bucket(tensors=("c",), wire_dtype="float32")),
        plan(
            bucket(wire_dtype="float16"), Bucket(tensors=("c",), wire_dtype="float32")
        ),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_plan_for_another_model_is_refused_by_name():
    model = workload(tensor("a"), tensor("b"))
    fits = plan(
        Bucket(tensors=("a", "b"), wire_dtype="float32"), workload_digest=model.digest
    )
    fits.check_matches(model)
    fits.check_matches(workload(tensor("b"), tensor("a")))
    old = dataclasses.replace(fits, workload_digest=model.ordered_digest)
    old.check_matches(model)
    with pytest.raises(PlanMismatch, match="'c'"):
        plan(Bucket(tensors=("a", "c"), wire_dtype="float32")).check_matches(model)
    with pytest.raises(PlanMismatch, match="'b'"):
        plan(Bucket(tensors=("a",), wire_dtype="float32")).check_matches(model)
    with pytest.raises(PlanMismatch, match="digest"):
        plan(Bucket(tensors=("a", "b"), wire_dtype="float32")).check_matches(model)


@given(elements=st.integers(0, 10**9), slices=st.integers(1, 64))
def test_slices_are_nearly_equal_and_cover_every_element_once(elements, slices):
    bounds = slice_bounds(elements, slices)
    assert len(bounds) == min(elements, slices)
    sizes = [end - start for start, end in bounds]
    assert sum(sizes) == elements
    assert all(size > 0 for size in sizes)
    if bounds:
        assert bounds[0][0] == 0
        assert bounds[-1][1] == elements
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))


def test_a_flow_is_never_faster_than_its_link():
    capped = Link(**LINK, stream_bytes_per_s=3e8)
    assert capped.flow_bytes_per_s == 3e8
    assert Link(**LINK, stream_bytes_per_s=3e9).flow_bytes_per_s == 1e9
    assert Link(**LINK).flow_bytes_per_s == 1e9


def test_a_cluster_of_one_host_is_bound_by_what_is_inside():
    inside = Link(latency_s=0.0, bandwidth_bytes_per_s=1e10)
    figures = {"name": "c", "inter_host": Link(**LINK), "intra_host": inside}
    assert Cluster(hosts=1, ranks_per_host=4, **figures).bottleneck is inside
    assert Cluster(hosts=2, ranks_per_host=4, **figures).bottleneck.latency_s == 0.0
    assert Cluster(hosts=2, ranks_per_host=4, **figures).ranks == 8


def test_tracks_are_in_reading_order():
    line = Timeline(
        name="x",
        spans=tuple(
            Span(track=track, name="s", start_s=0.0, end_s=1.0)
            for track in ("note", "lane10", "lane2", "compute", "lane2")
        ),
    )
    assert line.tracks == ("compute", "lane2", "lane10", "note")
    assert line.end_s == 1.0
    assert Timeline(name="x", spans=()).end_s == 0.0
