"""Report to a host's keeper whether a rank computes a step or waits for others."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, final

from stretto import foreground_marks, variable_names
from stretto.errors import SpecError
from stretto.members.progress import Doing, ProgressWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


_MIN_LIMIT_S = 30.0
_TIMES_MEDIAN = 10.0
_FIRST_STEPS = 3
"""Steps that are not judged: they compile and open connections."""

_KEPT = 64
_MEDIAN_EVERY = 8


@final
class StepProgress:
    """A rank's side of `members.progress`; receives marks of waits, too."""

    def __init__(self) -> None:
        """Do nothing where no keeper has started this rank.

        Raises:
            SpecError: the variable's value is not a number of seconds.
        """
        text = os.environ.get(variable_names.HANG_S, "")
        try:
            self._min_limit_s = float(text or _MIN_LIMIT_S)
        except ValueError:
            raise SpecError(
                f"{variable_names.HANG_S} must be a number of seconds, got {text!r}"
            ) from None
        path = os.environ.get(variable_names.PROGRESS)
        self._page: ProgressWriter | None = None
        self._may_judge = self._min_limit_s > 0
        if path:
            self._page = ProgressWriter(path)
            if self._may_judge:
                foreground_marks.add(self)
        self._durations: deque[float] = deque(maxlen=_KEPT)
        self._steps, self._began_s = 0, 0.0
        self._is_judged = False

    def begin_step(self, committed: int) -> None:
        """Mark the start of a step; from the fourth on, it may count as hanging.

        Args:
            committed: steps of the job that are committed.
        """
        self._began_s = time.perf_counter()
        if self._page is None:
            return
        self._page.steps = committed + 1
        self._is_judged = self._may_judge and self._steps >= _FIRST_STEPS
        self._page.note(Doing.COMPUTING if self._is_judged else Doing.ANYTHING)

    def end_step(self) -> None:
        """Mark the end of a step; the next one's input counts as computing, too."""
        self._durations.append(time.perf_counter() - self._began_s)
        page, self._steps = self._page, self._steps + 1
        if page is None:
            return
        if self._steps == _FIRST_STEPS or self._steps % _MEDIAN_EVERY == 0:
            median_s = statistics.median(self._durations)
            page.limit_s = max(self._min_limit_s, _TIMES_MEDIAN * median_s)
        if self._is_judged:
            page.note(Doing.COMPUTING)

    def rest(self) -> None:
        """Suspend the limit until the next step begins."""
        self._is_judged = False
        if self._page is not None:
            self._page.note(Doing.ANYTHING)

    # marks of waits

    def step(self, source: object = None) -> None:
        """Do nothing: a block of `Elastic.step` is a step."""

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        """Mark the start of a wait for other ranks."""
        if self._page is not None and self._is_judged:
            self._page.note(Doing.WAITING)

    def end_wait(self) -> None:
        """Mark the end of a wait."""
        if self._page is not None and self._is_judged:
            self._page.note(Doing.COMPUTING)

    def predict(self, source: object, windows: Sequence[Any]) -> None:
        """Do nothing."""
