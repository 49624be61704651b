"""After settling: is a step still what it was?"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import final

WINDOW_STEPS = 8
"""Steps whose median is compared with what was settled."""

CHANGED_RATIO = 0.15
"""A median further from the settled one than this, either way, is a change."""

WINDOWS = 2
"""So many windows in a row must say so: a passing disturbance is no reason."""

REST_STEPS = 100
"""After a search that changed nothing, the next waits so long, then twice, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A lasting change of the step time."""

    before_s: float

    now_s: float


@final
class Watch:
    """Watches step times on one rank; what ranks say to each other is the caller's.

    `add` collects a window; when it is full the caller has all ranks agree on the
    slowest rank's median and passes that to `judge`.
    """

    def __init__(self, settled_s: float | None) -> None:
        """Watches against a settled step time; ``None``: the first window's median."""
        self.settled_s = settled_s
        self._window_s: list[float] = []
        self._seen = 0
        self._off: list[float] = []
        self._rest = 0
        self._rests = 0

    def add(self, step_s: float) -> float | None:
        """Takes a step; the window's median when it is full.

        Steps that do not count are infinite; a window with too many is infinite.
        """
        self._seen += 1
        if math.isfinite(step_s):
            self._window_s.append(step_s)
        if self._seen < WINDOW_STEPS:
            return None
        kept, self._window_s, self._seen = self._window_s, [], 0
        if len(kept) < WINDOW_STEPS // 2:
            return math.inf
        return statistics.median(kept)

    def judge(self, median_s: float) -> Change | None:
        """Whether all ranks' median, the slowest's, ends a lasting change."""
        if math.isinf(median_s):
            return None
        if self.settled_s is None:
            self.settled_s = median_s
            return None
        if self._rest > 0:
            self._rest -= WINDOW_STEPS
            return None
        ratio = median_s / self.settled_s
        low, high = 1 - CHANGED_RATIO, 1 + CHANGED_RATIO
        if low <= ratio <= high or (self._off and (self._off[-1] > 1) != (ratio > 1)):
            self._off = []
            return None
        self._off.append(ratio)
        if len(self._off) < WINDOWS:
            return None
        self._off = []
        change = Change(before_s=self.settled_s, now_s=median_s)
        self.settled_s = median_s
        return change

    def settled_again(self, step_s: float | None, *, better: bool) -> None:
        """A search that a change re-opened ended; ``better``: it found another plan.

        Where it did not, the next one waits, each time twice as long: a step time that
        wanders must not be searched for ever.
        """
        self.settled_s = step_s
        self._window_s, self._seen, self._off = [], 0, []
        self._rests = 0 if better else self._rests + 1
        self._rest = 0 if better else REST_STEPS * 2 ** (self._rests - 1)
