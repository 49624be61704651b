"""Hypothesis strategies for workloads, clusters and plans.

The shapes are those on which planners differ: gradients that become ready evenly, in
bursts, as many tiny tensors, or with one giant tensor last (as BERT's embedding does).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from stretto.schema import (
    AllReduceFit,
    Bucket,
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    Plan,
    RateCurve,
    TensorSpec,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPES = ("uniform", "bursty", "giant_last", "tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBuckets:
    """Buckets of neighboring tensors, in the form that `StepModel` takes."""

    ends: tuple[int, ...]

    lanes: int

    bucket_lanes: tuple[int, ...]

    slices: tuple[int, ...]

    def plan(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        overlap: str = "backward",
        algorithm: str = "ring",
        launch: tuple[int, ...] = (),
    ) -> Plan:
        """Return the equivalent plan; gradients keep their type on the wire."""
        tensors = workload.tensors
        buckets = [
            Bucket(
                tensors=tuple(tensor.name for tensor in tensors[first:end]),
                lane=lane,
                slices=slices,
                algorithm=algorithm,
                wire_dtype="float32",
            )
            for (first, end), lane, slices in zip(
                pairwise((0, *self.ends)), self.bucket_lanes, self.slices, strict=True
            )
        ]
        return Plan(
            planner="drawn",
            workload_digest=workload.digest,
            ranks=cluster.ranks,
            overlap=overlap,
            lanes=self.lanes,
            buckets=tuple(buckets),
            launch=launch,
        )


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    shapes: Sequence[str] = SHAPES,
    min_tensors: int = 1,
    max_tensors: int = 12,
    min_elements: int = 0,
) -> Workload:
    """Generate workloads of float32 tensors, with steps of milliseconds to a second."""
    shape = draw(st.sampled_from(shapes))
    count = draw(st.integers(min_tensors, max_tensors))
    elements = [
        max(min_elements, size) for size in _sizes(draw, shape=shape, count=count)
    ]
    gap = st.floats(0.0, 0.02)
    if shape == "bursty":
        gap = st.one_of(st.just(0.0), st.just(0.0), st.floats(0.005, 0.05))
    ready_s = list(accumulate(draw(gap) for _ in range(count)))
    forward_s = draw(st.floats(0.0, 0.1))
    return Workload(
        name=shape,
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=ready_s[-1] + draw(st.floats(0.0, 0.05)),
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=4 * elements[i],
                dtype="float32",
                ready_s=ready_s[i],
                needed_s=forward_s * (count - 1 - i) / count,
            )
            for i in range(count)
        ),
    )


def _sizes(draw: st.DrawFn, *, shape: str, count: int) -> list[int]:
    """Generate elements per tensor, log-uniform."""
    low, high = (0, 12) if shape == "tiny" else (0, 20)
    sizes = [draw(st.integers(0, 2 ** draw(st.integers(low, high))))]
    for _ in range(count - 1):
        exponent = draw(st.integers(low, high))
        sizes.append(draw(st.integers(2**exponent // 2, 2**exponent)))
    if shape == "giant_last":
        sizes[-1] = 4 * sum(sizes) + 1
    return sizes


@st.composite
def clusters(
    draw: st.DrawFn,
    *,
    min_hosts: int = 1,
    max_hosts: int = 8,
    max_ranks_per_host: int = 4,
    fitted: bool | None = None,
    concurrent: bool | None = None,
    contended: bool | None = None,
) -> Cluster:
    """Generate clusters with or without optional coefficients; ``None``: either."""

    def wanted(choice: bool | None) -> bool:  # noqa: FBT001
        return draw(st.booleans()) if choice is None else choice

    bandwidth = draw(st.floats(1e7, 1e10))
    stream = None
    if draw(st.booleans()):
        stream = bandwidth * draw(st.floats(0.05, 1.5))
    inter_host = Link(
        latency_s=draw(latencies()),
        bandwidth_bytes_per_s=bandwidth,
        stream_bytes_per_s=stream,
    )
    intra_host = Link(
        latency_s=draw(latencies()), bandwidth_bytes_per_s=draw(st.floats(1e9, 1e11))
    )
    return Cluster(
        name="drawn",
        hosts=draw(st.integers(min_hosts, max_hosts)),
        ranks_per_host=draw(st.integers(1, max_ranks_per_host)),
        inter_host=inter_host,
        intra_host=intra_host,
        allreduce=draw(fits(bandwidth)) if wanted(fitted) else None,
        concurrency=draw(concurrencies()) if wanted(concurrent) else None,
        contention=draw(contentions(bandwidth)) if wanted(contended) else None,
    )


def latencies() -> st.SearchStrategy[float]:
    """Generate None, a tiny time, or one so long that it dominates, in seconds."""
    return st.one_of(st.just(0.0), st.floats(1e-6, 1e-4), st.floats(1e-3, 1e-2))


@st.composite
def fits(draw: st.DrawFn, bandwidth_bytes_per_s: float) -> AllReduceFit:
    """Generate fitted all-reduces near a link's bandwidth, sometimes faster than it."""
    return AllReduceFit(
        startup_s=draw(latencies()),
        s_per_byte=draw(st.floats(0.5, 10.0)) / bandwidth_bytes_per_s,
        ranks=draw(st.integers(2, 16)),
    )


@st.composite
def concurrencies(draw: st.DrawFn) -> Concurrency:
    """Generate slow-downs from none to more than proportional."""
    steps = draw(st.lists(st.floats(0.0, 1.5), max_size=7))
    return Concurrency(
        gamma=tuple(accumulate(steps, initial=1.0)),
        startup_per_lane_s=draw(latencies()),
    )


@st.composite
def contentions(draw: st.DrawFn, bandwidth_bytes_per_s: float) -> Contention:
    """Generate contention with one to three levels; either curve may be faster."""
    levels = draw(st.sets(st.integers(1, 4096), min_size=1, max_size=3))
    return Contention(
        compute=ComputeContention(
            alpha1=draw(st.floats(0.7, 1.1)), alpha2=draw(st.floats(0.0, 3e-4))
        ),
        overlapped=draw(_curves(bandwidth_bytes_per_s)),
        exclusive=draw(_curves(bandwidth_bytes_per_s)),
        resources=tuple(sorted(levels)),
    )


@st.composite
def _curves(draw: st.DrawFn, bandwidth_bytes_per_s: float) -> RateCurve:
    gamma1 = bandwidth_bytes_per_s * draw(st.floats(0.1, 1.5))
    return RateCurve(
        gamma1=gamma1,
        gamma2=gamma1 * draw(st.floats(0.0, 0.95)),
        gamma3=draw(st.floats(0.0, 0.1)),
        gamma4=draw(st.floats(0.0, 1.0)),
    )


@st.composite
def choices(
    draw: st.DrawFn, workload: Workload, *, max_lanes: int = 8, max_slices: int = 8
) -> DrawnBuckets:
    """Generate ways to cut a workload into buckets and to send them."""
    count = len(workload.tensors)
    cuts: set[int] = set()
    if count > 1:
        cuts = draw(st.sets(st.integers(1, count - 1)))
    ends = (*sorted(cuts), count)
    lanes = draw(st.integers(1, max_lanes))
    on_lane, parts = st.integers(0, lanes - 1), st.integers(1, max_slices)
    return DrawnBuckets(
        ends=ends,
        lanes=lanes,
        bucket_lanes=tuple(draw(on_lane) for _ in ends),
        slices=tuple(draw(parts) for _ in ends),
    )


@st.composite
def plans(
    draw: st.DrawFn,
    workload: Workload,
    cluster: Cluster,
    *,
    overlaps: Sequence[str] = ("none", "backward"),
    algorithms: Sequence[str] = ("ring",),
) -> Plan:
    """Generate plans with tensors in any order and any of the cluster's resources.

    With overlap ``forward`` they launch in any order.
    """
    order = draw(st.permutations(workload.tensors))
    choice = draw(choices(workload))
    levels: list[int | None] = [None]
    if cluster.contention is not None:
        levels.extend(cluster.contention.resources)
    buckets = [
        Bucket(
            tensors=tuple(tensor.name for tensor in order[first:end]),
            lane=lane,
            slices=slices,
            resource=draw(st.sampled_from(levels)),
            algorithm=draw(st.sampled_from(algorithms)),
            wire_dtype="float32",
        )
        for (first, end), lane, slices in zip(
            pairwise((0, *choice.ends)),
            choice.bucket_lanes,
            choice.slices,
            strict=True,
        )
    ]
    overlap = draw(st.sampled_from(overlaps))
    launch: tuple[int, ...] = ()
    if overlap == "forward":
        launch = draw(st.just(()) | st.permutations(range(len(buckets))).map(tuple))
    return Plan(
        planner="drawn",
        workload_digest=workload.digest,
        ranks=cluster.ranks,
        overlap=overlap,
        lanes=choice.lanes,
        buckets=tuple(buckets),
        launch=launch,
    )
