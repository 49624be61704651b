"""Plain values of a step's marks, and their spans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stretto.schema import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime.recorder import BucketRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMarks:
    """Times of the events in one step of one rank, in seconds of that rank's clock."""

    number: int
    """Number of backwards since recording began: the same on all ranks."""

    forward_s: tuple[float, float]

    backward_s: float
    """Time of the first gradient of the model's output."""

    computed_s: float
    """End of backward's computation."""

    ended_s: float
    """Time at which all gradients were reduced and in place."""

    launched: tuple[tuple[int, float], ...] = ()
    """(bucket, launch time of its slices)."""

    finished: tuple[tuple[int, int, float], ...] = ()
    """(bucket, lane, end of a slice's all-reduce)."""

    def shifted(self, offset_s: float) -> StepMarks:
        """Return the same step on a clock that is ahead by ``offset_s``."""
        return replace(
            self,
            forward_s=(self.forward_s[0] + offset_s, self.forward_s[1] + offset_s),
            backward_s=self.backward_s + offset_s,
            computed_s=self.computed_s + offset_s,
            ended_s=self.ended_s + offset_s,
            launched=tuple((b, s + offset_s) for b, s in self.launched),
            finished=tuple((b, n, s + offset_s) for b, n, s in self.finished),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSent:
    """One slice on its lane."""

    bucket: int
    lane: int
    number: int
    launched_s: float
    finished_s: float


def slices_sent(step: StepMarks, buckets: Sequence[BucketRow]) -> list[SliceSent]:
    """Return the slices of a step in order of their ends.

    Slices of one bucket on one lane are assumed to end in slice order.
    """
    launched_s = dict(step.launched)
    numbers = {
        (index, lane): [n for n, part in enumerate(row.slices) if part[0] == lane]
        for index, row in enumerate(buckets)
        for lane in {part[0] for part in row.slices}
    }
    return [
        SliceSent(
            bucket=bucket,
            lane=lane,
            number=numbers[bucket, lane].pop(0),
            launched_s=launched_s[bucket],
            finished_s=end_s,
        )
        for bucket, lane, end_s in sorted(step.finished, key=lambda mark: mark[2])
    ]


def compute_spans(step: StepMarks, origin_s: float) -> list[Span]:
    """Return forward and backward of a step."""
    start_s, end_s = step.forward_s
    return [
        _compute("forward", start_s - origin_s, end_s - origin_s),
        _compute("backward", step.backward_s - origin_s, step.computed_s - origin_s),
    ]


def lane_spans(
    step: StepMarks, buckets: Sequence[BucketRow], origin_s: float
) -> list[Span]:
    """Return waits and sends of a step's slices, as seen by a single rank.

    The time of a slice's first byte is not visible from outside. A lane is one
    connection, so it is drawn as if it sent its slices one after another.
    """
    spans: list[Span] = []
    free_s: dict[int, float] = {}
    for part in slices_sent(step, buckets):
        ready_s, end_s = part.launched_s, part.finished_s
        start_s = min(max(ready_s, free_s.get(part.lane, ready_s)), end_s)
        free_s[part.lane] = end_s
        name, args = slice_words(part, buckets)
        track = f"lane{part.lane}"
        if start_s > ready_s:
            spans.append(
                Span(
                    track=track,
                    name=f"wait {name}",
                    start_s=ready_s - origin_s,
                    end_s=start_s - origin_s,
                    args={"kind": "wait", **args},
                )
            )
        spans.append(
            Span(
                track=track,
                name=name,
                start_s=start_s - origin_s,
                end_s=end_s - origin_s,
                args={"kind": "send", **args},
            )
        )
    return spans


def slice_words(
    part: SliceSent, buckets: Sequence[BucketRow]
) -> tuple[str, dict[str, Any]]:
    """Return name and args of a slice's span."""
    row = buckets[part.bucket]
    name = f"bucket {part.bucket}"
    if len(row.slices) > 1:
        name += f" slice {part.number + 1}/{len(row.slices)}"
    return name, {
        "bucket": part.bucket,
        "slice": part.number,
        "bytes": row.slices[part.number][1],
        "tensors": len(row.tensors),
    }


def _compute(kind: str, start_s: float, end_s: float) -> Span:
    return Span(
        track="compute",
        name=kind,
        start_s=start_s,
        end_s=max(start_s, end_s),
        args={"kind": kind},
    )
