"""Moves between drafts that keep them consistent: merge, split and move buckets.

A draft's resources and algorithms stay empty until one is chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from stretto.planners._joint.launch import merged_order, split_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners.base import Draft

_T = TypeVar("_T")


def complexity(draft: Draft) -> tuple[object, ...]:
    """Return what makes a draft more complex than another, the most important first.

    Overlap with forward, collectives, lanes, buckets, where they end, and their order.
    """
    return (
        draft.overlap == "forward",
        draft.collectives,
        draft.lanes,
        len(draft.ends),
        draft.ends,
        draft.launch,
    )


def simpler_drafts(draft: Draft, starts: tuple[int, ...]) -> Iterator[Draft]:
    """Yield drafts with fewer collectives or lanes, the greatest savings first."""
    used = max(
        lane + slices
        for lane, slices in zip(draft.bucket_lanes, draft.slices, strict=True)
    )
    if used < draft.lanes:
        yield replace(draft, lanes=used)
    for bucket in range(len(draft.ends) - 1):
        end = draft.ends[bucket]
        if starts[end] != end:
            yield merged(draft, bucket)
    for bucket, slices in enumerate(draft.slices):
        for fewer in dict.fromkeys((1, slices // 2, slices - 1)):
            if 0 < fewer < slices:
                yield replace(draft, slices=put(draft.slices, bucket, fewer))


def steps(cuts: Sequence[int]) -> list[int]:
    """Return the first, second, fourth, ... of the cuts."""
    return [cuts[2**i - 1] for i in range(len(cuts).bit_length())]


def put(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    """Return the values with one replaced."""
    return (*values[:index], value, *values[index + 1 :])


def without(values: tuple[_T, ...], index: int) -> tuple[_T, ...]:
    """Return the values with one removed; an empty tuple stays empty."""
    return values[:index] + values[index + 1 :]


def with_end(draft: Draft, bucket: int, end: int) -> Draft:
    """Return the draft with another end of a bucket."""
    return replace(draft, ends=put(draft.ends, bucket, end))


def with_sending(draft: Draft, bucket: int, lane: int, slices: int) -> Draft:
    """Return the draft with another first lane and number of slices of a bucket."""
    return replace(
        draft,
        bucket_lanes=put(draft.bucket_lanes, bucket, lane),
        slices=put(draft.slices, bucket, slices),
    )


def turned(draft: Draft, bucket: int, turn: int) -> Draft:
    """Return the draft with a bucket and all later ones shifted by some lanes."""
    later = [(lane + turn) % draft.lanes for lane in draft.bucket_lanes[bucket:]]
    return replace(draft, bucket_lanes=(*draft.bucket_lanes[:bucket], *later))


def with_resource(draft: Draft, bucket: int, resource: int | None) -> Draft:
    """Return the draft with another resource of a bucket."""
    resources = draft.resources or (None,) * len(draft.ends)
    return replace(draft, resources=put(resources, bucket, resource))


def with_algorithm(draft: Draft, bucket: int, algorithm: str) -> Draft:
    """Return the draft with another algorithm of a bucket."""
    algorithms = draft.algorithms or ("ring",) * len(draft.ends)
    return replace(draft, algorithms=put(algorithms, bucket, algorithm))


def merged(draft: Draft, bucket: int) -> Draft:
    """Merge a bucket with the next; keep the sending of the one with more slices."""
    keeps_next = draft.slices[bucket + 1] > draft.slices[bucket]
    gone = bucket if keeps_next else bucket + 1
    return replace(
        draft,
        ends=without(draft.ends, bucket),
        slices=without(draft.slices, gone),
        bucket_lanes=without(draft.bucket_lanes, gone),
        resources=without(draft.resources, gone),
        algorithms=without(draft.algorithms, gone),
        launch=merged_order(draft.launch, bucket),
    )


def split(draft: Draft, bucket: int, cut: int, lane: int) -> Draft:
    """Split a bucket in two, the second on ``lane``; all else is unchanged."""
    after = bucket + 1
    return replace(
        draft,
        ends=(*draft.ends[:bucket], cut, *draft.ends[bucket:]),
        slices=(*draft.slices[:after], *draft.slices[bucket:]),
        bucket_lanes=(*draft.bucket_lanes[:after], lane, *draft.bucket_lanes[after:]),
        resources=(*draft.resources[:after], *draft.resources[bucket:]),
        algorithms=(*draft.algorithms[:after], *draft.algorithms[bucket:]),
        launch=split_order(draft.launch, bucket),
    )
