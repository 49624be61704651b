"""A small job on a capped network, and what any point of its space takes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.schema import AllReduceFit, Cluster, Link, TensorSpec, Workload
from stretto.tune.search_space import Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.tune.search_space import Point

MIB = 2**20


@pytest.fixture(scope="session")
def workload() -> Workload:
    sizes = [MIB // 4, MIB, 3 * MIB, 4 * MIB, 2 * MIB, MIB // 2, 4096, 8 * MIB]
    return Workload(
        name="small",
        framework="pytorch",
        device="cpu",
        batch_per_rank=8,
        forward_s=0.03,
        backward_s=0.1,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=size,
                dtype="float32",
                ready_s=0.1 * (i + 1) / len(sizes),
                needed_s=0.03 * (len(sizes) - 1 - i) / len(sizes),
            )
            for i, size in enumerate(sizes)
        ),
    )


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1.2e8, stream_bytes_per_s=0.35e8)
    return Cluster(
        name="capped",
        hosts=4,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=0.003, s_per_byte=4.3e-8, ranks=4),
    )


@pytest.fixture(scope="session")
def space(workload: Workload) -> Space:
    return Space(workload)


@pytest.fixture(scope="session")
def step_s(space: Space, cluster: Cluster) -> Callable[[Point], float]:
    """A point's step time under the simulator, seconds; computed once each."""
    known = {
        point: space.plan(point, cluster).predicted.iteration_s
        for point in space.points
    }
    return known.__getitem__
