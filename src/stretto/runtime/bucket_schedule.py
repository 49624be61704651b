"""The lanes and slices on which the gradients of one bucket are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stretto.runtime.recording.step import BucketRow

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One collective: elements ``start`` to ``end`` of a bucket, on a lane.

    A complex gradient counts as two real elements, as the Reducer sends it.
    """

    lane: int

    resource: int | None

    start: int

    end: int

    algorithm: str = ""
    """The plan's choice; empty for the lane's own algorithm."""


def lane_of(lanes: Mapping[tuple[int, int | None], Any], part: Slice) -> Any:
    """Return the open lane of a slice, with the slice's algorithm."""
    lane = lanes[part.lane, part.resource]
    # A lane with one algorithm has nothing to choose.
    choose = getattr(lane, "using", None) if part.algorithm else None
    return lane if choose is None else choose(part.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSchedule:
    """The lanes and slices of one bucket."""

    index: int

    tensors: tuple[str, ...]

    parameters: tuple[int, ...]
    """Positions in the owner's list of tensors, which is DDP's list of parameters for a
    planned model."""

    elements: int

    slices: tuple[Slice, ...]

    wire: str | None = None
    """Type on the wire if it differs from the gradients' own."""

    label: str = ""
    """The bucket's name in messages; empty for one of its index and tensors."""

    def row(self, dtype: str) -> BucketRow:
        """Describe the bucket to an observer; its gradients have type ``dtype``."""
        width_bytes: int = getattr(torch, self.wire or dtype).to_real().itemsize
        return BucketRow(
            tensors=self.tensors,
            slices=tuple(
                (part.lane, (part.end - part.start) * width_bytes)
                for part in self.slices
            ),
        )

    @property
    def place(self) -> str:
        """Bucket, tensors and lanes for messages."""
        lanes = sorted({part.lane for part in self.slices})
        word = "lane" if len(lanes) == 1 else "lanes"
        return f"{self.name} on {word} {', '.join(map(str, lanes))}"

    def place_on(self, part: Slice) -> str:
        """Bucket, tensors and the lane of one slice for messages."""
        return f"{self.name} on lane {part.lane}"

    @property
    def name(self) -> str:
        """Bucket and tensors for messages."""
        if self.label:
            return self.label
        more = len(self.tensors) - 1
        names = f"{self.tensors[0]!r}" + (f" and {more} more" if more else "")
        return f"the all-reduce of bucket {self.index} ({names})"
