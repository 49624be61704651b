"""A background's view of its foreground, from the marks it has read. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.background.board import COMMUNICATING, COMPUTING, WAITING
from stretto.background.pacing import Situation
from stretto.background.paired_steps import StepRecord
from stretto.background.windows import Window, WindowLearner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.background.board import Mark
    from stretto.background.windows import Expected

MIN_STALE_S = 1.0
_STALE_STEPS = 10
"""Steps, and seconds, without a mark after which a foreground is stale."""


@final
@dataclass(slots=True)
class _Step:
    number: int
    begin_s: float
    waits: list[Window]
    late_s: float = 0.0
    used_s: float = 0.0


@final
@dataclass(slots=True)
class _Ran:
    """Tasks of the background that began in one step of the foreground."""

    step: _Step | None
    begin_s: float
    last_begin_s: float
    end_s: float = math.inf


@final
class ForegroundView:
    """Follows the foreground's marks.

    Its windows are the predicted ones until the same waits have been seen in
    `stretto.background.windows.KNOWN_AFTER` steps, then the learned ones.
    """

    def __init__(
        self,
        on_step: Callable[[StepRecord], None],
        *,
        idles_in_communication: bool = True,
    ) -> None:
        """Start without a foreground.

        Args:
            on_step: called with each complete step.
            idles_in_communication: whether tasks may start while the foreground's
                communication uses the device.
        """
        self._on_step = on_step
        self._idle_states = (
            (WAITING, COMMUNICATING) if idles_in_communication else (WAITING,)
        )
        self._predicted: tuple[Window, ...] = ()
        self.steps_s = self.idle_s = self.used_s = self.task_steps_s = 0.0
        """Length of all foregrounds' complete steps, of the waits in them, of the tasks
        that ended in them, and of the steps in which a task ran."""

        # Where no requests are recorded, the background always has one.
        self._asked_s = self._asked_until_s = -math.inf
        self.forget(0)

    def forget(self, number: int) -> None:
        """Forget the foreground; ignore its marks up to a number."""
        self.learner = WindowLearner()
        self.steps = 0
        """Complete steps seen."""

        self._longest_s = _longest_s(self._predicted)
        self._last_number = number
        self._last: Mark | None = None
        self._step: _Step | None = None
        self.step_s = 0.0
        """Usual length of a step; 0 before it is known."""

        self._late_from_s: float | None = None
        self._open: deque[_Ran] = deque()
        self._ran: deque[_Ran] = deque()

    @property
    def last_number(self) -> int:
        """Number of the last mark."""
        return self._last_number

    def add(self, marks: Sequence[Mark]) -> None:
        """Add marks, oldest first."""
        for mark in marks:
            if mark.number != self._last_number + 1:
                self._step = None  # some of its marks are lost
            self._last_number = mark.number
            self._add(mark)

    def _add(self, mark: Mark) -> None:
        last, self._last = self._last, mark
        step = self._step
        if step is None or mark.step != step.number:
            if step is not None and mark.step == step.number + 1:
                self._end_wait(last, mark.time_s)
                self._end_step(step, mark.time_s)
            # Without the step's own mark its begin is unknown.
            began = last is not None and mark.step == last.step + 1
            self._step = _Step(mark.step, mark.time_s, []) if began else None
        else:
            self._end_wait(last, mark.time_s)

    def _end_wait(self, last: Mark | None, time_s: float) -> None:
        if self._step is None or last is None or last.state == COMPUTING:
            return
        self._note_late(self._step, last.time_s, time_s)
        self._step.waits.append(
            Window(
                begin_s=last.time_s - self._step.begin_s,
                length_s=time_s - last.time_s,
                kind=last.kind,
            )
        )

    def _note_late(self, step: _Step, begin_s: float, end_s: float) -> None:
        """Add how long a task outlasts a wait: it runs still, or has ended since."""
        self._late_from_s = None
        if self._open and self._open[0].begin_s < end_s:
            self._late_from_s = end_s
        elif self._ran and begin_s < self._ran[-1].last_begin_s < end_s:
            step.late_s += max(0.0, self._ran[-1].end_s - end_s)

    def _end_step(self, step: _Step, end_s: float) -> None:
        duration_s = end_s - step.begin_s
        self.step_s = duration_s if not self.steps else (self.step_s + duration_s) / 2
        self.steps += 1
        self.steps_s += duration_s
        self.idle_s += sum(wait.length_s for wait in step.waits)
        self.used_s += step.used_s
        self.learner.add(step.waits)
        self._longest_s = self._longest()
        waited: dict[str, float] = {}
        for wait in step.waits:
            waited[wait.kind] = waited.get(wait.kind, 0.0) + wait.length_s
        tasks = (*self._ran, *self._open)
        had_task = any(t.end_s > step.begin_s and t.begin_s < end_s for t in tasks)
        self.task_steps_s += had_task * duration_s
        while self._ran and self._ran[0].end_s <= end_s:
            self._ran.popleft()
        self._on_step(
            StepRecord(
                duration_s=duration_s,
                had_task=had_task,
                had_request=self._asked_s < end_s or self._asked_until_s > step.begin_s,
                number=step.number,
                late_s=step.late_s,
                waited_s=waited,
            )
        )

    def request_began(self, time_s: float) -> None:
        """Record that the background waits for a lease."""
        self._asked_s = time_s

    def request_ended(self, time_s: float) -> None:
        """Record that it has the lease, or has stopped waiting."""
        self._asked_s, self._asked_until_s = math.inf, time_s

    def task_began(self, time_s: float) -> None:
        """Record that a task of the background has been started."""
        self._open.append(_Ran(self._step, time_s, time_s))

    def task_ended(self, time_s: float, length_s: float = 0.0) -> None:
        """Record that the oldest task has ended, and how long it had the device."""
        if not self._open:
            return
        if self._step is not None:
            self._step.used_s += length_s
        task = self._open.popleft()
        task.end_s = time_s
        if self._late_from_s is not None and self._step is not None:
            self._step.late_s += max(0.0, time_s - self._late_from_s)
            self._late_from_s = None
        last = self._ran[-1] if self._ran else None
        # Tasks that began in one step need one entry, however many there are.
        if last is not None and last.step is task.step:
            last.end_s, last.last_begin_s = time_s, task.last_begin_s
        else:
            self._ran.append(task)

    def is_stale(self, now_s: float) -> bool:
        """Return whether the last mark is too old, or is missing."""
        if self._last is None:
            return True
        allowed_s = max(MIN_STALE_S, _STALE_STEPS * self.step_s)
        return now_s - self._last.time_s > allowed_s

    @property
    def is_waiting(self) -> bool:
        """Whether tasks may use the device by the last mark, if a foreground runs."""
        return self._last is not None and self._last.state in self._idle_states

    def until_wait_s(self, now_s: float, min_s: float) -> float:
        """Return the seconds until the next wait usually begins; 0 if unknown.

        Args:
            now_s: the present time.
            min_s: waits that are usually shorter do not count, nor does the present
                one.
        """
        step = self._step
        if step is None:
            return 0.0
        position = len(step.waits) + int(self.is_waiting)
        begin_s = self.learner.next_begin_s(position, min_s)
        if begin_s is None:
            begin_s = self.step_s
        return max(0.0, step.begin_s + begin_s - now_s)

    def situation(self, now_s: float, outstanding: int) -> Situation:
        """Return what a decision at a time depends on, while a foreground runs."""
        last, is_waiting = self._last, self.is_waiting
        wait = self._expected() if is_waiting else None
        return Situation(
            has_foreground=True,
            is_stale=self.is_stale(now_s),
            is_waiting=is_waiting,
            kind=last.kind if last is not None and is_waiting else "",
            remaining_s=self._remaining_s(now_s, wait) if is_waiting else None,
            longest_s=self._longest_s,
            wait=wait,
            step_s=self.step_s,
            outstanding=outstanding,
        )

    @property
    def windows(self) -> tuple[Window, ...]:
        """The step's windows, learned or predicted."""
        return self.learner.windows or self._predicted

    def predict(self, windows: tuple[Window, ...]) -> None:
        """Set the windows that the foreground predicts."""
        self._predicted = windows
        self._longest_s = self._longest()

    @property
    def longest_s(self) -> float:
        """Length of the longest window, learned or predicted; 0 without any."""
        return self._longest_s

    def _longest(self) -> float:
        return self.learner.longest_s or _longest_s(self._predicted)

    def _expected(self) -> Expected | None:
        step, last = self._step, self._last
        if step is None or last is None:
            return None
        return self.learner.expected(len(step.waits), last.kind)

    def _remaining_s(self, now_s: float, wait: Expected | None) -> float | None:
        step, last = self._step, self._last
        if step is None or last is None:
            return None
        if wait is not None:
            return last.time_s + wait.short_s - now_s
        phase_s = now_s - step.begin_s
        for window in self._predicted:
            if window.begin_s <= phase_s < window.begin_s + window.length_s:
                return window.begin_s + window.length_s - phase_s
        return None


def _longest_s(windows: Sequence[Window]) -> float:
    return max((w.length_s for w in windows), default=0.0)
