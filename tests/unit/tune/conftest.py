"""A small job on a capped network, and what any point of its space takes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.testing.instances import capped_cluster, small_workload
from stretto.tune.search_space import Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Cluster, Workload
    from stretto.tune.search_space import Point


@pytest.fixture(scope="session")
def workload() -> Workload:
    return small_workload()


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return capped_cluster()


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
