"""Helpers of the papers' reproductions: small instances, and planning by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto import planners
from stretto.papers.result import Omission
from stretto.planners.base import Draft, finish, predicted_s
from stretto.schema import (
    AllReduceFit,
    Cluster,
    Concurrency,
    Link,
    TensorSpec,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


UNIT_BYTES = 80
"""Bytes of one unit in a small instance, so that tenths are whole numbers."""


def planned_s(
    name: str, workload: Workload, cluster: Cluster, **options: Any
) -> float | None:
    """Return the step time of a planner's plan, or ``None`` without such a planner."""
    if name not in planners.NAMES:
        return None
    return predicted_s(planners.get(name, **options).plan(workload, cluster))


def missing(*names: str) -> tuple[Omission, ...]:
    """List the missing planners as left out."""
    return tuple(
        Omission(item=f"planner {name}", reason="not available in this version")
        for name in names
        if name not in planners.NAMES
    )


def drafted_s(draft: Draft, workload: Workload, cluster: Cluster) -> float:
    """Return the step time of a plan over tensor indices."""
    return predicted_s(finish(draft, "example", workload, cluster))


def instance(sizes: Sequence[float], ready: Sequence[float]) -> Workload:
    """Return tensors of some units and ready times; the last is backward's end."""
    tensors = tuple(
        TensorSpec(
            name=f"t{i}",
            bytes=round(size * UNIT_BYTES / 8) * 8,
            dtype="float64",
            ready_s=time,
            needed_s=0.0,
        )
        for i, (size, time) in enumerate(zip(sizes, ready, strict=True))
    )
    return Workload(
        name="example",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=0.0,
        backward_s=max(ready),
        tensors=tensors,
    )


def unit_cluster(gamma: tuple[float, ...] = (1.0, 1.5)) -> Cluster:
    """Return a cluster with a start-up of 1 s and 1 s per unit on a fast link."""
    link = Link(latency_s=0.5, bandwidth_bytes_per_s=100 * UNIT_BYTES)
    return Cluster(
        name="example",
        hosts=2,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=1.0, s_per_byte=1 / UNIT_BYTES, ranks=2),
        concurrency=Concurrency(gamma=gamma),
    )
