"""The choices of a tuner: an ordered grid of ways to cut and send gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.planners.aiacc import MAX_LANES, dispatched, lane_choices
from stretto.planners.base import Draft, finish
from stretto.planners.ddp import capped_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload

Point = tuple[int, ...]
"""A position on every axis of a space, by index."""

FAMILIES = ("units", "slices")
"""``units``: packs are cut into units of one size, assigned to lanes in turn (AIACC);
``slices``: packs are cut into a fixed number of slices, whatever their size."""

UNIT_BYTES = tuple(2**18 * 4**i for i in range(5))
"""256 KiB to 64 MiB."""

OVERLAPS = ("backward", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension: its values, ordered so that neighbors are similar."""

    name: str

    values: tuple[object, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise SpecError(f"axis {self.name!r} needs at least one value")


@final
class Space:
    """The plans a tuner may try for one model, as points on a grid.

    Several points may describe the same plan (a unit larger than the model, more slices
    than lanes); `canonical` returns the one that represents them all.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        max_lanes: int = MAX_LANES,
        unit_bytes: Sequence[int] = UNIT_BYTES,
        overlaps: Sequence[str] = OVERLAPS[:1],
    ) -> None:
        """Create the space for a workload.

        Raises:
            SpecError: an axis is empty or a value is out of range.
        """
        if max_lanes < 1:
            raise SpecError(f"max_lanes must be >= 1, got {max_lanes}")
        total = sum(tensor.bytes for tensor in workload.tensors)
        # A unit larger than the whole model is the whole model.
        fitting = [u for u in unit_bytes if u < total]
        units = (*fitting, *[u for u in unit_bytes if u >= total][:1])
        lanes = lane_choices(max_lanes)
        self._workload = workload
        self.axes = (
            Axis(name="family", values=FAMILIES),
            Axis(name="unit_bytes", values=units),
            Axis(name="lanes", values=lanes),
            Axis(name="slices", values=lanes),
            Axis(name="overlap", values=tuple(overlaps)),
        )
        self.shape = tuple(len(axis.values) for axis in self.axes)
        self._drafts: dict[Point, Draft] = {}
        self._first: dict[Draft, Point] = {}
        for point in itertools.product(*map(range, self.shape)):
            draft = self._draft(point)
            self._drafts[point] = draft
            self._first.setdefault(draft, point)
        self.points = tuple(self._first.values())
        """One point for each distinct plan."""

    @property
    def middle(self) -> Point:
        """The point in the middle of every axis, for searches without a model."""
        return self.canonical(tuple(length // 2 for length in self.shape))

    def canonical(self, point: Point) -> Point:
        """Return the point that represents all points with the same plan.

        Raises:
            SpecError: the point is outside the space.
        """
        if point not in self._drafts:
            raise SpecError(f"point {point} is outside of shape {self.shape}")
        return self._first[self._drafts[point]]

    def plan(self, point: Point, cluster: Cluster, *, planner: str = "tuned") -> Plan:
        """Return the plan of a point, with its prediction on ``cluster``."""
        return finish(self.draft(point), planner, self._workload, cluster)

    def draft(self, point: Point) -> Draft:
        """Return the plan of a point, over tensor indices."""
        return self._drafts[self.canonical(point)]

    def describe(self, point: Point) -> dict[str, object]:
        """Return the point's values by axis name."""
        return {
            axis.name: axis.values[i] for axis, i in zip(self.axes, point, strict=True)
        }

    def _draft(self, point: Point) -> Draft:
        family, unit, lanes, slices, overlap = (
            axis.values[i] for axis, i in zip(self.axes, point, strict=True)
        )
        assert isinstance(unit, int)  # noqa: S101
        assert isinstance(lanes, int)  # noqa: S101
        assert isinstance(slices, int)  # noqa: S101
        ends = capped_ends(self._workload, unit, unit)
        if family == "units":
            draft = dispatched(self._workload, ends, unit, lanes)
        else:
            # More slices than lanes would only queue behind each other.
            draft = Draft.in_turn(ends, lanes=lanes, slices=min(slices, lanes))
        return _tidy(draft, str(overlap))


def _tidy(draft: Draft, overlap: str) -> Draft:
    """Return the draft without unused lanes, so that equal plans compare equal."""
    used = {
        (lane + i) % draft.lanes
        for lane, slices in zip(draft.bucket_lanes, draft.slices, strict=True)
        for i in range(slices)
    }
    lanes = draft.lanes if len(used) == draft.lanes else max(used) + 1
    wraps = any(
        lane + slices > lanes
        for lane, slices in zip(draft.bucket_lanes, draft.slices, strict=True)
    )
    return Draft(
        ends=draft.ends,
        slices=draft.slices,
        bucket_lanes=draft.bucket_lanes,
        lanes=draft.lanes if wraps else lanes,
        overlap=overlap,
    )
