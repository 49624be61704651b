"""A supervisor's reports of an attempt's steps, for `supervisor`.

`stretto.background.step_reports` writes the counts, in each rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

from stretto.step_counts import StepCounts, create

if TYPE_CHECKING:
    from pathlib import Path

_HANG_STEPS = 10
_HANG_S = 5.0
"""A rank without a step for so long, and for `_HANG_STEPS` usual ones, may hang."""


@final
class StepReports:
    """Reads the count of one rank."""

    def __init__(self, path: Path, ranks: int, rank: int, batch: int | None) -> None:
        """Create the file.

        Args:
            path: of the file of step counts.
            ranks: how many may count in it.
            rank: whose steps are reported.
            batch: samples of a step.
        """
        create(path, ranks)
        self._counts, self._rank, self._batch = StepCounts(path), rank, batch
        self._steps, self._last_s, self._usual_s = 0, 0.0, 0.0
        self._is_late = False

    def next(self) -> dict[str, Any] | None:
        """Return the steps since the last report, if there are any.

        A rank that makes none for long is reported once, by ``idle_s``.
        """
        count = self._counts.read(self._rank)
        if count.steps < self._steps:  # the rank started again on other devices
            self._steps, self._is_late = 0, False
        if count.steps > max(1, self._steps):
            # The first step is longer than others; its length is not known anyway.
            since_s = self._last_s if self._steps else count.first_s
            step_s = (count.last_s - since_s) / (count.steps - max(1, self._steps))
            self._steps, self._last_s = count.steps, count.last_s
            self._usual_s, self._is_late = step_s, False
            return self._report()
        idle_s = time.monotonic() - self._last_s
        limit_s = max(_HANG_S, _HANG_STEPS * self._usual_s)
        if self._steps and not self._is_late and idle_s > limit_s:
            self._is_late = True
            return self._report() | {"idle_s": idle_s}
        return None

    def _report(self) -> dict[str, Any]:
        step_s, rate = self._usual_s, None
        if self._batch is not None and step_s > 0.0:
            rate = self._batch / step_s
        return {"step": self._steps, "step_s": step_s, "samples_per_s": rate}
