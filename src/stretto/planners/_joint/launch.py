"""Launch orders of drafts with overlap ``forward``.

The order is the same in every step, so it is made from the model: one pipe sends
bucket after bucket, each time the one of those ready that forward needs first (earliest
deadline first: Liu and Layland, Journal of the ACM 20(1), 1973). On several lanes,
where buckets travel at the same time, this is a start that climbing improves.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, final

from stretto.planners.base import linear_cost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners.base import Draft, LinearCost
    from stretto.schema import Cluster, Workload

PACES = (1.0, 0.8, 1.25)
"""Rates of the pipe, relative to the cluster's, by which orders are made: the order for
another rate may be better where lanes, slices or contention make one pipe a poor model.
"""


def earliest_need_first(
    ready_s: Sequence[float], needed_s: Sequence[float], takes_s: Sequence[float]
) -> tuple[int, ...]:
    """Return the order in which one pipe sends buckets, first needed first.

    Args:
        ready_s: by bucket, ascending.
        needed_s: by bucket; of equals the first goes first.
        takes_s: by bucket, how long the pipe is busy with it.
    """
    order: list[int] = []
    ready: list[tuple[float, int]] = []
    now = 0.0
    arriving = 0
    number = len(ready_s)
    while len(order) < number:
        if not ready:
            now = max(now, ready_s[arriving])
        while arriving < number and ready_s[arriving] <= now:
            heappush(ready, (needed_s[arriving], arriving))
            arriving += 1
        _, bucket = heappop(ready)
        order.append(bucket)
        now += takes_s[bucket]
    return tuple(order)


@final
class LaunchOrders:
    """Makes launch orders for the drafts of one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        """Initialize; the cost of each number of lanes is computed when first used."""
        tensors = workload.tensors
        self._workload = workload
        self._cluster = cluster
        self._ready_s = [tensor.ready_s for tensor in tensors]
        self._needed_s = [tensor.needed_s for tensor in tensors]
        self._bytes = list(accumulate((t.bytes for t in tensors), initial=0))
        self._costs: dict[int, LinearCost] = {}

    def of(self, draft: Draft, pace: float = 1.0) -> Draft:
        """Return the draft with overlap ``forward``, in the order that one pipe sends.

        ``pace`` is the pipe's rate relative to that of all the draft's lanes.
        """
        cost = self._costs.get(draft.lanes)
        if cost is None:
            cost = linear_cost(self._workload, self._cluster, slices=draft.lanes)
            self._costs[draft.lanes] = cost
        ready_s, needed_s, takes_s = [], [], []
        first = 0
        for end, slices in zip(draft.ends, draft.slices, strict=True):
            size = self._bytes[end] - self._bytes[first]
            startup_s = cost.startup_s * min(1.0, slices / draft.lanes)
            ready_s.append(self._ready_s[end - 1])
            needed_s.append(min(self._needed_s[first:end]))
            takes_s.append((startup_s + cost.s_per_byte * size) / pace if size else 0.0)
            first = end
        order = earliest_need_first(ready_s, needed_s, takes_s)
        return replace(draft, overlap="forward", launch=tidy(order))


def in_turn(draft: Draft) -> Draft:
    """Return the draft with lanes taken in turn in launch order."""
    lanes = list(draft.bucket_lanes)
    lane = 0
    for bucket in draft.launch or range(len(lanes)):
        lanes[bucket] = lane
        lane = (lane + draft.slices[bucket]) % draft.lanes
    return replace(draft, bucket_lanes=tuple(lanes))


def tidy(order: Sequence[int]) -> tuple[int, ...]:
    """Return a launch order, empty if it is that of the buckets."""
    order = tuple(order)
    return () if order == tuple(range(len(order))) else order


def other_orders(draft: Draft, bucket: int, *, every: bool) -> Iterator[Draft]:
    """Yield the draft with a bucket at other places of its launch order.

    The nearest places come first; without ``every``, only those 1, 2, 4, ... away.
    """
    number = len(draft.ends)
    order = draft.launch or tuple(range(number))
    now = order.index(bucket)
    distance = 1
    while distance < number:
        for place in (now - distance, now + distance):
            if 0 <= place < number:
                left = [*order[:now], *order[now + 1 :]]
                left.insert(place, bucket)
                yield replace(draft, launch=tidy(left))
        distance = distance + 1 if every else 2 * distance


def merged_order(launch: tuple[int, ...], bucket: int) -> tuple[int, ...]:
    """Return the order after a bucket and the next became one, at the next's place."""
    left = [b for b in launch if b != bucket]
    return tidy([b - 1 if b > bucket else b for b in left])


def split_order(launch: tuple[int, ...], bucket: int) -> tuple[int, ...]:
    """Return the order after a bucket became two, one right after the other."""
    order: list[int] = []
    for b in launch:
        order.append(b + 1 if b > bucket else b)
        if b == bucket:
            order.append(bucket + 1)
    return tidy(order)


def halves_swapped(draft: Draft, bucket: int) -> Draft:
    """Return a draft in which a bucket and the next launch the other way around."""
    after = {bucket: bucket + 1, bucket + 1: bucket}
    order = [after.get(b, b) for b in draft.launch or range(len(draft.ends))]
    return replace(draft, launch=tidy(order))
