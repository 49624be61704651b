"""Relaxation over one edge of the graph, for many rows of times at once.

Arrays carry a suffix: r rows, h widths of the layer before, k widths of the layer
after.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from stretto.planners.burst.problem import BurstProblem, Floats, Ints

# Up to this many additions a step tries each pair of widths: fewer calls are faster.
_DENSE = 40_000

# Up to this many widths an edge's costs are kept in a table.
_TABLED = 256


@final
class EdgeCost:
    """comm over one edge, infinite where the limit forbids it.

    comm grows with the samples moved alone, so the limit of a width is a window around
    it, and the lowest over a window needs no search over pairs: O(n log n) for n widths
    with a limit, O(n) without.
    """

    def __init__(
        self, problem: BurstProblem, source: int, target: int, *, moved: bool
    ) -> None:
        self._samples = problem.samples
        self._each_s = problem.sample_s[source]
        self._delay_s = problem.network.delay_s
        self._moved = moved
        self._slack_s = problem.slack_s[target]
        self._limited = problem.amplification_limit is not None

    @cached_property
    def _movable(self) -> Floats:
        """Samples that may move, by width of the layer after; below 0 for none."""
        room = self._slack_s - self._delay_s
        if self._each_s <= 0:
            return np.where(room >= 0, np.inf, -1.0)
        movable: Floats = np.floor(np.maximum(room / self._each_s + 1e-9, -1.0))
        return movable

    @cached_property
    def dense_hk(self) -> Floats:
        """The comm by both widths."""
        s, own = self._samples, np.arange(len(self._samples))
        if self._moved:
            moves_hk = np.maximum(s[:, None], s[None, :])
        else:
            moves_hk = np.abs(s[:, None] - s[None, :])
        cost_hk = self._each_s * moves_hk + self._delay_s
        cost_hk[moves_hk > self._movable] = np.inf
        if not self._moved:
            cost_hk[own, own] = np.where(self._slack_s >= 0, 0.0, np.inf)
        return cost_hk

    def column(self, after: int) -> Floats:
        """Return the comm into one width, by the width before."""
        s = self._samples
        if len(s) <= _TABLED:
            return self.dense_hk[:, after]
        moves_h = np.maximum(s, s[after]) if self._moved else np.abs(s - s[after])
        cost_h: Floats = self._each_s * moves_h + self._delay_s
        cost_h[moves_h > self._movable[after]] = np.inf
        if not self._moved:
            cost_h[after] = 0.0 if self._slack_s[after] >= 0 else np.inf
        return cost_h

    @cached_property
    def _windows(self) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Half-open windows of narrower and of wider predecessors, by width after."""
        s, own = self._samples, np.arange(len(self._samples))
        movable = self._movable
        if self._moved:
            low = np.searchsorted(-s, -movable, side="left")
            high = np.where(s <= movable, len(s), own)
            return (low, own), (own, high)
        low = np.searchsorted(-s, -(s + movable), side="left")
        high = np.searchsorted(-s, -(s - movable), side="right")
        none = movable < 0
        low, high = np.where(none, own, low), np.where(none, own, high)
        return (low, own), (own + 1, high)

    def relax(self, times_rh: Floats) -> Floats:
        """Return the lowest time + comm over widths before, by row and width after."""
        count = len(self._samples)
        if len(times_rh) * count * count <= _DENSE:
            best: Floats = (times_rh[:, :, None] + self.dense_hk).min(axis=1)
            return best
        # fast: widths along the first axis, where NumPy's accumulate and indexing work
        # on whole rows; 3 times faster than along the second.
        times_hr = times_rh.T
        move_s, delay_s = (self._each_s * self._samples)[:, None], self._delay_s
        if self._limited:
            return self._relax_limited(times_hr, move_s).T
        if self._moved:
            narrow = np.full_like(times_hr, np.inf)
            np.minimum.accumulate((times_hr + move_s)[:-1], axis=0, out=narrow[1:])
            rest = np.minimum.accumulate(times_hr[::-1], axis=0)[::-1]
            return (np.minimum(narrow, rest + move_s) + delay_s).T
        narrow = np.minimum.accumulate(times_hr + move_s, axis=0) - move_s
        wide = np.minimum.accumulate((times_hr - move_s)[::-1], axis=0)[::-1]
        shortest = np.minimum(narrow, wide + move_s) + delay_s
        return np.minimum(shortest, times_hr, out=shortest).T

    def _relax_limited(self, times_hr: Floats, move_s: Floats) -> Floats:
        narrower, wider = self._windows
        narrow = _range_min(times_hr + move_s, *narrower)
        if self._moved:
            wide = _range_min(times_hr, *wider) + move_s
            return np.minimum(narrow, wide) + self._delay_s
        wide = _range_min(times_hr - move_s, *wider) + move_s
        shortest = np.minimum(narrow - move_s, wide) + self._delay_s
        stay = np.where((self._slack_s >= 0)[:, None], times_hr, np.inf)
        return np.minimum(shortest, stay, out=shortest)


def min_plus(left_rh: Floats, right_hk: Floats) -> Floats:
    """Return the min-plus product."""
    if left_rh.size * right_hk.shape[1] <= 2**20:
        small_rk: Floats = (left_rh[:, :, None] + right_hk).min(axis=1)
        return small_rk
    out_rk: Floats = left_rh[:, :1] + right_hk[0]
    for h in range(1, len(right_hk)):
        np.minimum(out_rk, left_rh[:, h : h + 1] + right_hk[h], out=out_rk)
    return out_rk


def _range_min(values_hr: Floats, low: Ints, high: Ints) -> Floats:
    """Return the lowest of each half-open window of rows, infinite if it is empty.

    A sparse table: O(n log n) for n rows.
    """
    shortest = np.full((len(low), values_hr.shape[1]), np.inf)
    length = high - low
    width, table = 1, values_hr
    longest = int(length.max(initial=0))
    while width <= longest:
        (at,) = np.nonzero((length >= width) & (length < 2 * width))
        if len(at):
            shortest[at] = np.minimum(table[low[at]], table[high[at] - width])
        if 2 * width <= longest:
            table = np.minimum(table[:-width], table[width:])
        width *= 2
    return shortest
