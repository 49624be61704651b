"""Divide GPUs among the branches of a block so that they end early together.

Branches that take turns add up; those beside each other share GPUs. Times are given
either for one pair of widths (`BranchTimes`) or as a curve: an array of times by number
of GPUs (rows, suffix p) for many pairs at once (columns, suffix c). Called by
`stretto.planners.burst.search`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import neg
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stretto.planners.burst.problem import Floats, Ints


@dataclass(frozen=True, slots=True)
class BranchTimes:
    """A branch's times, decreasing, by the GPUs it may use."""

    gpus: list[int]
    times_s: list[float]

    def need(self, time_s: float) -> int | None:
        """Return the fewest GPUs with which it ends in time."""
        at = bisect_left(self.times_s, -time_s, key=neg)
        return self.gpus[at] if at < len(self.gpus) else None


def longest(
    turns: list[Floats], beside: list[Floats], home: list[int], away: list[int]
) -> Floats:
    """Return the sum of those that take turns, or the longest beside them."""
    total = turns[home[0]]
    for b in home[1:]:
        total = total + turns[b]
    for b in away:
        total = np.maximum(total, beside[b])
    return total


def sum_of(curves: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    """Return one curve over their shared GPUs for branches that take turns."""
    if len(curves) == 1:
        return curves[0]
    grid = np.unique(np.concatenate([g for g, _ in curves]))
    total = np.zeros((len(grid), curves[0][1].shape[1]))
    for own, curve in curves:
        at = np.searchsorted(own, grid, side="right") - 1
        total += np.where((at >= 0)[:, None], curve[at], np.inf)
    return grid, total


def in_turns(lanes: list[BranchTimes]) -> BranchTimes:
    """Return branches that take turns as one lane."""
    if len(lanes) == 1:
        return lanes[0]
    if all(lane.gpus == lanes[0].gpus for lane in lanes):
        times = [
            sum(column) for column in zip(*(x.times_s for x in lanes), strict=True)
        ]
        return BranchTimes(lanes[0].gpus, times)
    grid, total = sum_of(
        [(np.array(x.gpus), np.array(x.times_s)[:, None]) for x in lanes]
    )
    return BranchTimes(grid.tolist(), total[:, 0].tolist())


def shared(
    lanes: list[BranchTimes], cap: int, below_s: float
) -> tuple[float, list[int]] | None:
    """Return the shortest time below ``below_s`` for all lanes, and their GPUs.

    A time is feasible if the GPUs that all lanes need for it are together at most
    ``cap``. It is a time of some lane; bisection finds it in each.
    """
    best: tuple[float, list[int]] | None = None
    needs = _all_needs(lanes, math.nextafter(below_s, 0.0))
    if needs is None or sum(needs) > cap:
        return None
    for lane in lanes:
        low, high = bisect_right(lane.times_s, -below_s, key=neg), len(lane.gpus)
        while low < high:
            middle = (low + high) // 2
            needs = _all_needs(lanes, lane.times_s[middle])
            if needs is not None and sum(needs) <= cap:
                best, below_s = (lane.times_s[middle], needs), lane.times_s[middle]
                low = middle + 1
            else:
                high = middle
    return best


def _all_needs(lanes: list[BranchTimes], time_s: float) -> list[int] | None:
    needs = []
    for lane in lanes:
        if (need := lane.need(time_s)) is None:
            return None
        needs.append(need)
    return needs


def share_all(lanes: list[tuple[Ints, Floats]], caps: Ints, min_pc: Floats) -> None:
    """Lower each column's times by capacity to what lanes sharing it need.

    The GPUs that all lanes need together fall with the time they are given. In the
    order of all lanes' times, a lane's need follows from how many of its own times have
    passed, so one sort per column gives each time's capacity.
    """
    if len(lanes) == 1:
        ((grid, curve),) = lanes
        at = np.searchsorted(grid, caps, side="right") - 1
        reached = at >= 0
        min_pc[reached] = np.minimum(min_pc[reached], curve[at[reached]])
        return
    times_ct = np.concatenate([curve for _, curve in lanes]).T
    order_ct = np.argsort(times_ct, axis=1, kind="stable")
    times_ct = np.take_along_axis(times_ct, order_ct, axis=1)
    too_many, begin = int(caps[-1]) + 1, 0
    needs_ct = np.zeros(times_ct.shape, np.int64)
    for grid, _ in lanes:
        own = np.zeros(times_ct.shape[1], np.int64)
        own[begin : begin + len(grid)] = 1
        sizes = np.append(too_many, grid[::-1])
        needs_ct += sizes[own[order_ct].cumsum(axis=1)]
        begin += len(grid)
    # Among times with the same need the shortest comes last and is kept.
    found_cp = np.full((len(times_ct), len(caps) + 1), np.inf)
    at_ct = np.searchsorted(caps, needs_ct[:, ::-1])
    found_cp[np.arange(len(times_ct))[:, None], at_ct] = times_ct[:, ::-1]
    np.minimum.accumulate(found_cp, axis=1, out=found_cp)
    np.minimum(min_pc, found_cp[:, :-1].T, out=min_pc)
