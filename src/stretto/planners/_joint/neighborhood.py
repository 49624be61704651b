"""The changes of one bucket among which climbing takes the first that is faster.

Called by `DraftSearch`; annealing draws its changes at random (`anneal.Neighbors`) but
cuts buckets at the same places.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, final

from stretto.planners._joint.launch import halves_swapped, in_turn, other_orders
from stretto.planners._joint.moves import (
    merged,
    split,
    steps,
    turned,
    with_algorithm,
    with_end,
    with_resource,
    with_sending,
)
from stretto.planners.base import dtype_starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners._joint.launch import LaunchOrders
    from stretto.planners._joint.space import JointSpace
    from stretto.planners.base import Draft
    from stretto.schema import Workload

_FEW_TENSORS = 16
_FEW_LANES = 3


def has_few(workload: Workload) -> bool:
    """Return whether there are few enough tensors to try more."""
    return len(workload.tensors) <= _FEW_TENSORS


@final
class Neighborhood:
    """The drafts one change away from a draft, within the open dimensions."""

    def __init__(
        self, workload: Workload, space: JointSpace, orders: LaunchOrders
    ) -> None:
        tensors = workload.tensors
        self._space = space
        self._orders = orders
        self._few = has_few(workload)
        self.dtype_starts = dtype_starts(workload)
        """By tensor: where its run of one type starts."""
        # Where buckets may end: after the last tensor of each ready time.
        self._cuts = tuple(
            i
            for i in range(1, len(tensors))
            if self._few
            or tensors[i].ready_s > tensors[i - 1].ready_s
            or self.dtype_starts[i] == i
        )

    def between(self, begin: int, end: int) -> tuple[int, ...]:
        """Return cuts strictly between two tensors, within what types allow."""
        low = bisect_right(self._cuts, begin)
        high = bisect_left(self._cuts, end)
        return self._cuts[low:high]

    def of(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        """Yield drafts in which a bucket is cut, sent or reduced in another way.

        With overlap ``forward`` each has the launch order of the draft, then the one
        that fits its own buckets. That order never waits for a bucket that is about to
        be ready, so where the bucket is split its second part may also launch first.
        Orders in which the bucket moves follow. Another order is tried with the lanes
        as they are, and in turn.
        """
        if draft.overlap != "forward":
            yield from self._changes(draft, bucket)
            return
        for other in self._changes(draft, bucket):
            yield other
            ordered = self._orders.of(other)
            if ordered.launch != other.launch:
                yield from _on_other_lanes(ordered)
            if len(other.ends) > len(draft.ends):
                yield from _on_other_lanes(halves_swapped(other, bucket))
        for ordered in other_orders(draft, bucket, every=self._few):
            yield from _on_other_lanes(ordered)

    def _changes(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        if self._space.fusion:
            yield from self._other_cuts(draft, bucket)
        yield from self._other_sending(draft, bucket)
        yield from self._other_kinds(draft, bucket)

    def _other_cuts(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        begin = draft.ends[bucket - 1] if bucket else 0
        end = draft.ends[bucket]
        if begin and self.dtype_starts[begin] != begin:
            before = draft.ends[bucket - 2] if bucket > 1 else 0
            yield merged(draft, bucket - 1)
            for cut in steps(self.between(before, begin)[::-1]):
                yield with_end(draft, bucket - 1, cut)
            for cut in steps(self.between(begin, end)):
                yield with_end(draft, bucket - 1, cut)
        inside = self.between(begin, end)
        if len(inside) <= _FEW_TENSORS:
            cuts: Sequence[int] = inside
        else:
            cuts = [inside[len(inside) * i // 8] for i in range(1, 8)]
        for cut in cuts:
            same = draft.bucket_lanes[bucket]
            turn = (same + draft.slices[bucket]) % draft.lanes
            for lane in dict.fromkeys((same, turn)):
                yield split(draft, bucket, cut, lane)
            if self._few and draft.lanes <= _FEW_LANES:
                yield from _on_all_lanes(split(draft, bucket, cut, same), bucket)

    def _other_sending(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        if draft.lanes == 1:
            return
        now = (draft.bucket_lanes[bucket], draft.slices[bucket])
        for slices in range(1, draft.lanes + 1 if self._space.slices else 2):
            lanes = range(draft.lanes) if slices < draft.lanes else (now[0],)
            for lane in lanes:
                if (lane, slices) != now:
                    yield with_sending(draft, bucket, lane, slices)
        # This one and all later ones, shifted by some lanes.
        for turn in range(1, draft.lanes):
            yield turned(draft, bucket, turn)

    def _other_kinds(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        """Yield another resource or algorithm, for the bucket or from it on."""
        number = len(draft.ends)
        if len(self._space.resources) > 1:
            now = draft.resources[bucket] if draft.resources else None
            for resource in self._space.resources:
                if resource != now:
                    yield with_resource(draft, bucket, resource)
        if len(self._space.algorithms) > 1:
            algorithm_now = draft.algorithms[bucket] if draft.algorithms else "ring"
            for algorithm in self._space.algorithms:
                if algorithm != algorithm_now:
                    yield with_algorithm(draft, bucket, algorithm)
        if bucket == number - 1 and draft.resources:
            for resource in self._space.resources:
                yield replace(draft, resources=(resource,) * number)


def _on_other_lanes(draft: Draft) -> Iterator[Draft]:
    """Yield a draft, and with its lanes in turn in launch order."""
    yield draft
    turned_draft = in_turn(draft)
    if turned_draft.bucket_lanes != draft.bucket_lanes:
        yield turned_draft


def _on_all_lanes(draft: Draft, bucket: int) -> Iterator[Draft]:
    """Yield a bucket and the next on any lanes, and all later ones shifted."""
    lanes = range(draft.lanes)
    for first, second, turn in product(lanes, repeat=3):
        other = with_sending(draft, bucket, first, draft.slices[bucket])
        other = with_sending(other, bucket + 1, second, draft.slices[bucket + 1])
        yield turned(other, bucket + 2, turn)
