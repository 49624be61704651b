"""Detect lasting changes of the step time after a plan has settled."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import final

WINDOW_STEPS = 8
"""Number of steps whose median is compared with earlier windows."""

REFERENCE_WINDOWS = 6
"""Windows after settling that form the reference before any is judged. A search ends
with few steps of each plan, and the machine may have been busy during them."""

REMEMBERED_WINDOWS = 20
"""Number of most recent windows that form the reference."""

CHANGED_RATIO = 0.15
"""A window that is outside the reference by more than this may be a change."""

USUAL_SHARE = 0.1
"""Share of the reference's windows, at either end, that count as outliers."""

WINDOWS = 3
"""Consecutive windows that must be outside the reference. Fewer are a passing
disturbance, which then joins the reference."""

REST_STEPS = 100
"""After a search that changed nothing, the next waits this long, then twice, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeChange:
    """A lasting change of the step time."""

    before_s: float

    now_s: float


@final
class DriftDetector:
    """Watch step times on one rank; the caller makes the ranks agree.

    `add` collects a window. When it is full, the caller has all ranks agree on the
    slowest rank's median and passes that to `judge`. The reference is the range of the
    windows seen: on a machine whose speed varies it is wide.
    """

    def __init__(self, settled_s: float | None) -> None:
        """Watch; ``settled_s`` is the step time that the search reported, if any."""
        self.settled_s = settled_s
        self._window_s: list[float] = []
        self._seen = 0
        self._reference_s: deque[float] = deque(maxlen=REMEMBERED_WINDOWS)
        self._levels_s: list[float] = []
        self._wanted = REFERENCE_WINDOWS
        self._outside_s: list[float] = []
        self._rest = 0
        self._rests = 0

    def add(self, step_s: float) -> float | None:
        """Add a step; return the window's median when it is full.

        Steps that do not count are infinite; a window with too many of them is
        infinite.
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

    def judge(self, median_s: float) -> StepTimeChange | None:
        """Return the change that the slowest rank's median completes, or None."""
        if math.isinf(median_s):
            return None
        if self._wanted > 0:
            self._wanted -= 1
            self._reference_s.append(median_s)
            self.settled_s = statistics.median(self._reference_s)
            return None
        if self._rest > 0:
            self._rest -= WINDOW_STEPS
            self._reference_s.append(median_s)
            return None
        side = self._side(median_s)
        if side == 0 or (self._outside_s and self._side(self._outside_s[-1]) != side):
            self._reference_s += [*self._outside_s, median_s]
            self._outside_s = []
            return None
        self._outside_s.append(median_s)
        if len(self._outside_s) < WINDOWS:
            return None
        now_s = statistics.median(self._outside_s)
        change = StepTimeChange(
            before_s=statistics.median(self._reference_s), now_s=now_s
        )
        self._reference_s += self._outside_s
        self._outside_s = []
        self._levels_s += [change.before_s, now_s]
        self.settled_s = now_s
        return change

    def _side(self, median_s: float) -> int:
        """Return 1 above the reference, -1 below it, 0 within it."""
        usual_s = sorted(self._reference_s)
        exceptions = int(USUAL_SHARE * len(usual_s))
        low_s = min([usual_s[exceptions], *self._levels_s])
        high_s = max([usual_s[-1 - exceptions], *self._levels_s])
        if median_s > (1 + CHANGED_RATIO) * high_s:
            return 1
        return -1 if median_s < (1 - CHANGED_RATIO) * low_s else 0

    def settled_again(self, step_s: float | None, *, better: bool) -> None:
        """Continue after a search that a change reopened; ``better``: another plan won.

        If none won, the plan is known to be right at both speeds, so neither is a
        change anymore. A step time outside both is ignored for a rest period that
        doubles each time, because a wandering step time must not trigger endless
        searches.
        """
        self.settled_s = step_s
        self._window_s, self._seen, self._outside_s = [], 0, []
        self._rests = 0 if better else self._rests + 1
        self._rest = 0 if better else REST_STEPS * 2 ** (self._rests - 1)
        if better:
            self._levels_s = []
            self._reference_s.clear()
            self._wanted = REFERENCE_WINDOWS
