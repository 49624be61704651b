"""Merge all ranks' records of a step on one clock.

# Note [Merged records]
A single rank's record shows only how long its collectives took. Together with the
others' records it shows which part of that was a wait for a rank that was not ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.runtime.recording.step import (
    StepMarks,
    compute_spans,
    slice_words,
    slices_sent,
)
from stretto.schema import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime.recording.gathering import RankRecord
    from stretto.runtime.recording.step import BucketRow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """When the last rank was ready, in one step."""

    computed: tuple[float, int]
    """(End of backward's computation on the slowest rank, that rank)."""

    launched: Mapping[int, tuple[float, int]]
    """By bucket: (time of the last rank's launch, that rank)."""


def merged_timeline(
    name: str,
    records: Mapping[int, RankRecord],
    buckets: Mapping[int, Sequence[BucketRow]],
) -> Timeline:
    """Return all ranks' steps on one clock, from the first forward's start.

    The clock is that of the lowest rank.

    Args:
        name: The timeline's name.
        records: By rank.
        buckets: The plan's buckets in each step, by the step's number.

    Only steps that every rank has are included. Every span has ``args["rank"]`` and
    ``args["step"]``; ``clock_error_s`` of a rank's ``forward`` is the error bound of
    its clock. In addition to a single rank's spans, the track ``compute`` has ``waits
    for rank N`` (kind ``peer``: another rank's backward was not computed yet), ``waits
    for communication`` (kind ``exposed``), and ``between steps`` (kind ``outside``:
    optimizer, input, everything else); lanes have ``bucket N waits for rank M`` (kind
    ``peer``).
    """
    common = set(buckets)
    for record in records.values():
        common &= {step.number for step in record.steps}
    if not common or not records:
        return Timeline(name=name, spans=())
    aligned = {
        rank: {
            step.number: step.shifted(record.clock.offset_s(step.forward_s[0]))
            for step in record.steps
            if step.number in common
        }
        for rank, record in records.items()
    }
    origin_s = min(step.forward_s[0] for s in aligned.values() for step in s.values())
    others = {n: _others({r: aligned[r][n] for r in aligned}) for n in common}
    spans: list[Span] = []
    for rank, steps in aligned.items():
        own = {step.number: step for step in records[rank].steps}
        ended_s: float | None = None
        for number in sorted(common):
            step = steps[number]
            tags = {"rank": rank, "step": number}
            error_s = records[rank].clock.bound_s(own[number].forward_s[0])
            made = [
                *_outside(ended_s, step, origin_s),
                *compute_spans(step, origin_s),
                *_exposed(rank, step, others[number], origin_s),
                *_lanes(rank, step, buckets[number], others[number], origin_s),
            ]
            ended_s = step.ended_s if number + 1 in common else None
            for span in made:
                more: dict[str, Any] = dict(tags)
                if span.args["kind"] == "forward":
                    more["clock_error_s"] = error_s
                spans.append(
                    Span(
                        track=span.track,
                        name=span.name,
                        start_s=span.start_s,
                        end_s=span.end_s,
                        args={**span.args, **more},
                    )
                )
    return Timeline(name=name, spans=tuple(spans))


def _others(steps: Mapping[int, StepMarks]) -> _Others:
    launched: dict[int, tuple[float, int]] = {}
    for rank, step in steps.items():
        for bucket, at_s in step.launched:
            launched[bucket] = max(launched.get(bucket, (at_s, rank)), (at_s, rank))
    return _Others(
        computed=max((step.computed_s, rank) for rank, step in steps.items()),
        launched=launched,
    )


def _outside(ended_s: float | None, step: StepMarks, origin_s: float) -> list[Span]:
    """Return the time since the previous step ended: optimizer and input."""
    if ended_s is None or step.forward_s[0] <= ended_s:
        return []
    return [
        _span(
            "compute",
            "between steps",
            (ended_s, step.forward_s[0]),
            origin_s,
            kind="outside",
        )
    ]


def _exposed(
    rank: int, step: StepMarks, others: _Others, origin_s: float
) -> list[Span]:
    """Return a rank's waits after its backward: for a rank, then for the network."""
    last_s, slowest = others.computed
    split_s = min(max(step.computed_s, last_s), step.ended_s)
    spans = []
    if slowest != rank and split_s > step.computed_s:
        spans.append(
            _span(
                "compute",
                f"waits for rank {slowest}",
                (step.computed_s, split_s),
                origin_s,
                kind="peer",
                waits_for=slowest,
            )
        )
    else:
        split_s = step.computed_s
    if step.ended_s > split_s:
        spans.append(
            _span(
                "compute",
                "waits for communication",
                (split_s, step.ended_s),
                origin_s,
                kind="exposed",
            )
        )
    return spans


def _lanes(
    rank: int,
    step: StepMarks,
    buckets: Sequence[BucketRow],
    others: _Others,
    origin_s: float,
) -> list[Span]:
    """Return slices on their lanes, from the records of all ranks.

    A slice moves when all ranks have launched it and its lane is free; it waited for
    the later of the two.
    """
    spans: list[Span] = []
    free_s: dict[int, float] = {}
    for part in slices_sent(step, buckets):
        track = f"lane{part.lane}"
        name, args = slice_words(part, buckets)
        start_s = part.launched_s
        freed_s = min(max(start_s, free_s.get(part.lane, start_s)), part.finished_s)
        met_s, last = others.launched[part.bucket]
        begin_s = min(max(freed_s, met_s), part.finished_s)
        free_s[part.lane] = part.finished_s
        if freed_s > start_s:
            at = (start_s, freed_s)
            spans.append(
                _span(track, f"wait {name}", at, origin_s, kind="wait", **args)
            )
        if begin_s > freed_s and last != rank:
            at = (freed_s, begin_s)
            words = f"{name} waits for rank {last}"
            spans.append(
                _span(track, words, at, origin_s, kind="peer", waits_for=last, **args)
            )
        else:
            begin_s = freed_s
        at = (begin_s, part.finished_s)
        spans.append(_span(track, name, at, origin_s, kind="send", **args))
    return spans


def _span(
    track: str, name: str, at_s: tuple[float, float], origin_s: float, **args: Any
) -> Span:
    start_s, end_s = at_s
    return Span(
        track=track,
        name=name,
        start_s=start_s - origin_s,
        end_s=max(start_s, end_s) - origin_s,
        args=args,
    )
