"""The grid of plans a tuner may try."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.tune.search_space import Space

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload


def test_points_mean_different_plans_and_all_plans_are_reached(
    space: Space, cluster: Cluster
) -> None:
    digests = {point: space.plan(point, cluster).digest for point in space.points}
    assert len(set(digests.values())) == len(digests)
    for point in itertools.product(*map(range, space.shape)):
        assert space.canonical(point) in digests
        assert space.canonical(space.canonical(point)) == space.canonical(point)


def test_every_plan_holds_every_tensor_once(
    space: Space, workload: Workload, cluster: Cluster
) -> None:
    for point in space.points:
        space.plan(point, cluster).check_matches(workload)


def test_a_unit_beyond_the_model_represents_all_larger_ones(
    workload: Workload,
) -> None:
    total = sum(tensor.bytes for tensor in workload.tensors)
    small = Space(workload, unit_bytes=(total, 2 * total, 4 * total))
    assert dict(zip(("family", "unit_bytes"), small.shape, strict=False)) == {
        "family": 2,
        "unit_bytes": 1,
    }


def test_what_lies_outside_is_refused(space: Space, workload: Workload) -> None:
    with pytest.raises(SpecError, match=r"point \(9, 0, 0, 0, 0\) is outside"):
        space.canonical((9, 0, 0, 0, 0))
    with pytest.raises(SpecError, match="max_lanes must be >= 1, got 0"):
        Space(workload, max_lanes=0)
    with pytest.raises(SpecError, match="axis 'unit_bytes' needs at least one"):
        Space(workload, unit_bytes=())


def test_the_middle_is_a_point_with_some_lanes_and_some_buckets(space: Space) -> None:
    at = space.describe(space.middle)
    assert space.middle in space.points
    assert at["lanes"] == 4
    assert at["overlap"] == "backward"
