"""From one draft to the next: what stays right when buckets are merged, split or moved.

A draft's resources and algorithms stay empty while nobody has chosen any.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners.base import Draft

_T = TypeVar("_T")


def plainness(draft: Draft) -> tuple[int, int, int, tuple[int, ...]]:
    """Collectives, then lanes, then buckets, then where they end."""
    return (draft.collectives, draft.lanes, len(draft.ends), draft.ends)


def plainer(draft: Draft, starts: tuple[int, ...]) -> Iterator[Draft]:
    """Drafts with fewer collectives or lanes, the greatest savings first."""
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
    """The first, second, fourth, ... of some cuts."""
    return [cuts[2**i - 1] for i in range(len(cuts).bit_length())]


def put(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    """The values with one replaced."""
    return (*values[:index], value, *values[index + 1 :])


def without(values: tuple[_T, ...], index: int) -> tuple[_T, ...]:
    """The values but one; none stay none."""
    return values[:index] + values[index + 1 :]


def with_end(draft: Draft, bucket: int, end: int) -> Draft:
    """A bucket that ends elsewhere."""
    return replace(draft, ends=put(draft.ends, bucket, end))


def with_sending(draft: Draft, bucket: int, lane: int, slices: int) -> Draft:
    """A bucket on another first lane, in another number of slices."""
    return replace(
        draft,
        bucket_lanes=put(draft.bucket_lanes, bucket, lane),
        slices=put(draft.slices, bucket, slices),
    )


def turned(draft: Draft, bucket: int, turn: int) -> Draft:
    """A bucket and all after it some lanes on."""
    later = [(lane + turn) % draft.lanes for lane in draft.bucket_lanes[bucket:]]
    return replace(draft, bucket_lanes=(*draft.bucket_lanes[:bucket], *later))


def with_resource(draft: Draft, bucket: int, resource: int | None) -> Draft:
    """A bucket with another resource."""
    resources = draft.resources or (None,) * len(draft.ends)
    return replace(draft, resources=put(resources, bucket, resource))


def with_algorithm(draft: Draft, bucket: int, algorithm: str) -> Draft:
    """A bucket with another algorithm."""
    algorithms = draft.algorithms or ("ring",) * len(draft.ends)
    return replace(draft, algorithms=put(algorithms, bucket, algorithm))


def merged(draft: Draft, bucket: int) -> Draft:
    """A bucket and the next as one, sent like the one in more slices."""
    keeps_next = draft.slices[bucket + 1] > draft.slices[bucket]
    gone = bucket if keeps_next else bucket + 1
    return replace(
        draft,
        ends=without(draft.ends, bucket),
        slices=without(draft.slices, gone),
        bucket_lanes=without(draft.bucket_lanes, gone),
        resources=without(draft.resources, gone),
        algorithms=without(draft.algorithms, gone),
    )


def split(draft: Draft, bucket: int, cut: int, lane: int) -> Draft:
    """A bucket in two, the second on a lane, both else as before."""
    after = bucket + 1
    return replace(
        draft,
        ends=(*draft.ends[:bucket], cut, *draft.ends[bucket:]),
        slices=(*draft.slices[:after], *draft.slices[bucket:]),
        bucket_lanes=(*draft.bucket_lanes[:after], lane, *draft.bucket_lanes[after:]),
        resources=(*draft.resources[:after], *draft.resources[bucket:]),
        algorithms=(*draft.algorithms[:after], *draft.algorithms[bucket:]),
    )
