"""The background's side: a lease of a device for each task."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from stretto.background.background_statistics import BackgroundStatistics
from stretto.background.board import FREE, BackgroundStatus, Board
from stretto.background.child_processes import child_processes
from stretto.background.devices import open_device
from stretto.background.foreground_view import ForegroundView
from stretto.background.pacing import (
    OPEN,
    Controller,
    Gate,
    Policy,
    Reason,
)
from stretto.background.pair_measurement import PairMeasurement
from stretto.background.program_change import leave_at_exec
from stretto.boolean_options import bool_option
from stretto.errors import BackgroundError, SpecError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from stretto.background.devices.base import EndedTask
    from stretto.background.priority import Isolation
    from stretto.schema.collocation import CollocatedPair

_log = get_logger(__name__)

_LOOK_EVERY_S = 0.1
_CHILDREN_EVERY_S = 1.0
_CHILDREN_S = 1.0
"""Processor time of child processes before a warning."""

_MIN_PAUSE_S, _PAUSE_S = 5e-5, 2e-4
_PAUSES_S = {Reason.CLOSED: 1e-2, Reason.STALE: 1e-3, Reason.CONTROL: 1e-3}
"""Pauses between looks at the board, longer where a wait is long."""

_STEP_PAUSES, _MAX_PAUSE_S = 500, 2e-3
"""Looks in a step of the foreground in which the gate is shut, at least: a look costs
processor time, a late one the start of a window."""

_FAR_PAUSES, _MAX_FAR_PAUSE_S = 50, 1e-2
"""The same while the next window is far away: a pause is at most half of that time."""

_LENGTHS = 8
"""Last lengths of tasks of one label. Three of four are at most the usual one: a task
that the system has held up says nothing about the next."""

_LATE_SHARE = 0.4
"""Share of the permitted loss for tasks that outlast waits."""

_UNFIT_STEPS = 50
"""Steps of the foreground without a fitting window before a warning."""

_MEASURE_AGAIN = 10
"""Steps in which a task fits no window before its length is measured again; doubles
each time. A first task is often longer than all later ones."""


@final
class Background:
    """Runs tasks on a device while its foreground waits.

        background = stretto.Background("cuda:0", max_loss=0.05)
        for batch in loader:
            with background.lease():
                train(batch)

    A lease opens at once while no foreground runs. Otherwise it opens when the task's
    usual length fits what is left of the foreground's wait, or, on processors where
    this process's priority was shown to be below the foreground's, at any time. One
    step of the foreground in sixteen (more at first, one in 64 once the loss is clearly
    small) runs without background; from the difference the background keeps the
    foreground's loss under ``max_loss``.
    """

    def __init__(
        self,
        device: str,
        *,
        max_loss: float = 0.05,
        policy: Policy | None = None,
        depth: int = 1,
        margin: float | None = None,
        adapts: bool = True,
        isolates: bool = True,
    ) -> None:
        """Claim a device.

        Args:
            device: for instance ``cpu``, ``cuda:0``, ``exclusive:NAME``.
            max_loss: permitted loss of the foreground, as a share of its step.
            policy: when tasks may start; chosen by the device if ``None``.
            depth: maximum number of outstanding tasks.
            margin: a task fits if (1 + margin) times its length does.
            adapts: change these limits by the foreground's measured loss.
            isolates: lower this process's priority, as the device permits.

        Raises:
            SpecError: an argument is invalid.
            BackgroundError: another process is this device's background.
        """
        adapts = bool_option("adapts", adapts)
        isolates = bool_option("isolates", isolates)
        gate = Gate(depth=depth) if margin is None else Gate(depth=depth, margin=margin)
        self._controller = Controller(gate, max_loss=max_loss)
        gate.is_control = adapts
        self._adapts, self._gate = adapts, gate
        self._device = open_device(device)
        self._board: Board | None = None
        self._owner = os.getpid()
        try:
            self._board = Board(device)
            self._board.claim_background()
        except BaseException:
            self.close()
            raise
        self.isolation = self._isolated(isolates=isolates)
        """How the foreground is kept first."""

        is_preempted = self.isolation is not None and self._device.preempts(
            self.isolation
        )
        gate.policy = policy or (Policy.OUTSTANDING if is_preempted else Policy.FITS)
        gate.closed_kinds = self._device.closed_kinds
        if adapts and policy is None:
            gate.late_ratio = _LATE_SHARE * min(max_loss, 1.0)
        self._controller.keep_first()
        self._view = ForegroundView(
            self._step_ended,
            idles_in_communication=self._device.idles_in_communication,
        )
        self._measurement = PairMeasurement()
        self._foreground = 0
        self._foregrounds = 0
        self._noted_number = self._board.last_number
        self._has_missed_foregrounds = False
        self._windows_number = 0
        self._usual_s: dict[str, float] = {}
        self._lengths_s: dict[str, deque[float]] = {}
        self._too_long: dict[str, int] = {}
        self._measure_after: dict[str, int] = {}
        self._label = ""
        self._too_long_label: str | None = None  # that of a task that did not fit
        self._unused_s = dict.fromkeys(Reason, 0.0)
        self._children_s, self._children_at_s = 0.0, 0.0
        self._children_before_s: float | None = None
        self._warned_of_children = False
        self._status = BackgroundStatus(is_preempted=is_preempted)
        self._loss_error = math.inf
        self._begin_s, self._look_at_s = perf_counter(), 0.0
        self._closings = 0
        self._unfit_steps, self._warned_of_unfit = 0, False
        self._is_open = False
        self._reason = Reason.NO_FOREGROUND
        atexit.register(self.close)
        leave_at_exec(self)

    def _isolated(self, *, isolates: bool) -> Isolation | None:
        if not isolates or self._board is None:
            return None
        found = self._device.isolate(self._board.foreground_pid)
        fails = found.ratio is not None and not found.works
        log = _log.warning if fails else _log.info
        log("background on %s: %s", self._device.name, found)
        return found

    # leases

    def lease(self, label: str = "") -> AbstractContextManager[None]:
        """Return a context that waits for the device, and has it for one task.

        Args:
            label: of tasks of about the same length; their lengths are learned.
        """
        return _Lease(self, label)

    def wait(self, label: str = "", *, timeout_s: float | None = None) -> bool:
        """Wait for the device; the task lasts until the next call.

        Args:
            label: of tasks of about the same length.
            timeout_s: return ``False`` after this time instead.
        """
        try:
            self.end_task()
            return self._wait(label, timeout_s)
        except BaseException:  # an interrupt, which the program may catch
            self.withdraw()
            raise

    def _wait(self, label: str, timeout_s: float | None) -> bool:
        begin_s = looked_s = perf_counter()
        self._view.request_began(begin_s)
        pause_s = _MIN_PAUSE_S
        while not self._started(label):
            before_s, looked_s = looked_s, perf_counter()
            if self._view.is_waiting:
                self._unused_s[self._reason] += looked_s - before_s
            waited_s = looked_s - begin_s
            if timeout_s is not None and waited_s > timeout_s:
                self._status.waited_s += waited_s
                self._view.request_ended(looked_s)
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s())
        self._is_open = True
        now_s = perf_counter()
        self._status.waited_s += now_s - begin_s
        self._view.request_ended(now_s)
        if self._foreground:
            self._view.task_began(now_s)
        # Without a foreground too: one may begin, and need the device, in this task.
        self._status.lease_begin_s = now_s
        self._claimed().publish(self._status)
        return True

    def _longest_pause_s(self) -> float:
        pause_s = _PAUSES_S.get(self._reason, _PAUSE_S)
        step_s = self._view.step_s
        by_step_s = min(step_s / _STEP_PAUSES, _MAX_PAUSE_S)
        far_s = 0.0
        if self._reason in (Reason.COMPUTING, Reason.TOO_LONG):
            min_s = self._usual_s.get(self._label, 0.0)
            far_s = self._view.until_wait_s(perf_counter(), min_s) / 2
        elif self._reason is Reason.CONTROL:
            far_s = step_s
        far_s = min(far_s, step_s / _FAR_PAUSES, _MAX_FAR_PAUSE_S)
        return max(pause_s, by_step_s, far_s)

    def end_task(self) -> None:
        """End the task of the last `wait`, if it has not ended."""
        try:
            if not self.has_lease:
                return
            self._device.end_task()
            self._is_open = False
            self._collect()
            self._status.lease_begin_s = 0.0
            self._claimed().publish(self._status)
        except BaseException:  # an interrupt
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """End the task, and give back what is reserved on the device for later ones."""
        if self._owner != os.getpid():
            return
        self._device.end_task()
        self._device.withdraw()
        self._is_open = False
        self._view.request_ended(perf_counter())
        self._status.lease_begin_s = 0.0
        if self._board is not None:
            self._board.publish(self._status)

    @property
    def has_lease(self) -> bool:
        """Whether a task of this process has the device."""
        return self._is_open and self._owner == os.getpid()

    def _started(self, label: str) -> bool:
        """Start a task if the gate permits it and the device is free."""
        self._label = label
        reason = self._reason = self._decide(label)
        if reason is Reason.TOO_LONG:
            self._too_long_label = label
        if reason not in OPEN:
            self._device.withdraw()
            return False
        waits = reason not in (Reason.FITS, Reason.CHEAP)
        depth = self._gate.depth if reason is Reason.DEPTH else 1
        return self._device.start_task(label, waits=waits, depth=depth)

    def _decide(self, label: str) -> Reason:
        board = self._claimed()
        if not board.has_foreground:
            self._note_missed(board)
            self._foreground, self._children_before_s = 0, None
            return Reason.NO_FOREGROUND
        now_s = perf_counter()
        if now_s > self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            if board.clear_ended_foreground():
                return Reason.NO_FOREGROUND
            if now_s > self._children_at_s:
                self._look_at_children(now_s)
        if board.foreground_pid != self._foreground:
            self._meet(board)
        if board.last_number != self._view.last_number:
            marks = board.marks_after(self._view.last_number)
            if any(mark.state == FREE for mark in marks):
                self._meet(board)  # another one in the same process
            else:
                self._view.add(marks)
        if board.windows_number != self._windows_number:
            self._predict(board)
        self._collect()
        situation = self._view.situation(now_s, self._device.outstanding)
        return self._gate.decide(situation, self._usual_s.get(label))

    def _look_at_children(self, now_s: float) -> None:
        """Count what child processes use of the processors beside a foreground."""
        self._children_at_s = now_s + _CHILDREN_EVERY_S
        found = child_processes()
        before_s, self._children_before_s = self._children_before_s, found.used_s
        if before_s is not None:
            self._children_s += max(0.0, found.used_s - before_s)
        if self.isolation is not None:
            self.isolation.extend_to(found.pids)
        if self._status.is_preempted or self._warned_of_children:
            return
        if self._children_s >= _CHILDREN_S:
            self._warned_of_children = True
            _log.warning(
                "background on %s: the processes that it has started, such as a "
                "DataLoader's workers, compute without leases, whatever the foreground "
                "does, and the measured loss leaves out what that costs: %.1f s of "
                "processor time so far. Only the main process waits for the device: "
                "compute there, and load data with num_workers=0 if the foreground "
                "needs the processors",
                self._device.name,
                self._children_s,
            )

    def _note_missed(self, board: Board) -> None:
        """Note a foreground that has written marks, and was not met."""
        number = board.last_number
        if number != self._noted_number:
            self._noted_number = number
            self._has_missed_foregrounds |= not self._foreground

    def _meet(self, board: Board) -> None:
        """Start to follow another foreground."""
        self._noted_number = board.last_number
        self._foreground = board.foreground_pid
        self._foregrounds += 1
        if self.isolation is not None:
            self.isolation.meet(self._foreground)
        self._view.forget(board.last_number)
        self._predict(board)
        for _ in range(self._device.outstanding):
            self._view.task_began(perf_counter())
        self._controller.reset()
        self._measurement.begin_foreground()
        self._gate.is_control = self._adapts
        self._unfit_steps, self._warned_of_unfit = 0, False

    def _predict(self, board: Board) -> None:
        self._windows_number = board.windows_number
        self._view.predict(board.windows())

    def _claimed(self) -> Board:
        if self._board is None:
            raise SpecError(
                "this background is closed: open another stretto.Background"
            )
        if self._owner != os.getpid():
            raise SpecError(
                f"this background is process {self._owner}'s, which this one was "
                "forked from: open one in the process that computes"
            )
        return self._board

    def _collect(self) -> None:
        for task in self._device.ended():
            self._add_ended(task)

    def _add_ended(self, task: EndedTask) -> None:
        if task.label not in self._usual_s:
            self._lengths_s[task.label] = deque(maxlen=_LENGTHS)
        lengths_s = self._lengths_s[task.label]
        lengths_s.append(task.length_s)
        usual_s = sorted(lengths_s)[3 * len(lengths_s) // 4]
        before_s = self._usual_s.get(task.label, 0.0)
        self._usual_s[task.label] = usual_s
        if self._foreground:
            self._view.task_ended(task.end_s, task.length_s)
        self._measurement.add_task(
            task.end_s,
            task.length_s,
            has_foreground=bool(self._foreground),
            depth=1 + self._device.outstanding,
        )
        status = self._status
        if usual_s >= status.usual_s:
            status.usual_s = usual_s
        elif before_s >= status.usual_s:  # the first task was longer than all others
            status.usual_s = max(self._usual_s.values())
        status.tasks += 1
        status.running_s += task.length_s

    # the foreground's loss

    def _step_ended(self, step: Any) -> None:
        if self._adapts:
            limits = self._gate.policy, self._gate.depth
            if self._controller.add(step):
                self._measurement.end_block(
                    perf_counter(), limits, *self._controller.last_block
                )
            self._status.loss = self._controller.loss
            self._loss_error = self._controller.loss_error
        if self._controller.closings > self._closings:
            if not self._closings:
                _log.warning(
                    "background on %s closed: it costs the foreground more than "
                    "max_loss=%g, however little runs; use shorter tasks or a larger "
                    "max_loss",
                    self._device.name,
                    self._controller.max_loss,
                )
            self._closings = self._controller.closings
        self._warn_unfit(had_task=step.had_task)
        if not step.had_task and self._too_long_label == self._label:
            self._count_too_long(self._label)
        self._too_long_label = None

    def _count_too_long(self, label: str) -> None:
        steps = self._too_long[label] = self._too_long.get(label, 0) + 1
        limit = self._measure_after.get(label, _MEASURE_AGAIN)
        if label in self._usual_s and steps >= limit:
            del self._usual_s[label]
            self._too_long[label], self._measure_after[label] = 0, 2 * limit

    def _warn_unfit(self, *, had_task: bool) -> None:
        gate = self._gate
        # Where a window fits, there was no task to run: it loads data, for instance.
        task_s = self._usual_s.get(self._label, 0.0)
        fits = task_s * (1.0 + gate.margin) <= self._view.longest_s
        if had_task or fits or gate.policy is not Policy.FITS or gate.is_closed:
            self._unfit_steps = 0
            return
        self._unfit_steps += 1
        if self._unfit_steps == _UNFIT_STEPS and not self._warned_of_unfit:
            self._warned_of_unfit = True
            _log.warning(
                "background on %s: no window fits its tasks of %.3g s; the longest is "
                "%.3g s: use shorter tasks",
                self._device.name,
                task_s,
                self._view.longest_s,
            )

    @property
    def device_name(self) -> str:
        """The name of its device."""
        return self._device.name

    @property
    def gate(self) -> Gate:
        """The limits in force; the controller changes them."""
        return self._gate

    @property
    def statistics(self) -> BackgroundStatistics:
        """Counts and times so far."""
        self._collect()
        if self._children_before_s is not None and self._owner == os.getpid():
            self._look_at_children(perf_counter())
        if self._board is not None:
            self._note_missed(self._board)
        return BackgroundStatistics(
            tasks=self._status.tasks,
            running_s=self._status.running_s,
            waited_s=self._status.waited_s,
            elapsed_s=perf_counter() - self._begin_s,
            loss=self._status.loss,
            loss_error=self._loss_error if math.isfinite(self._loss_error) else None,
            foregrounds=self._foregrounds,
            has_missed_foregrounds=self._has_missed_foregrounds,
            beside_s=self._view.used_s,
            steps_s=self._view.steps_s,
            task_steps_s=self._view.task_steps_s,
            idle_s=self._view.idle_s,
            children_s=self._children_s,
            unused_s={r.value: s for r, s in self._unused_s.items() if s},
            isolation="not asked for"
            if self.isolation is None
            else str(self.isolation),
        )

    def measured_pair(self, foreground: str, background: str) -> CollocatedPair:
        """Return what this background cost its last foreground, and what it got.

        Args:
            foreground: the foreground's name, such as its model.
            background: this job's name.

        Raises:
            SpecError: too little was measured; the message says what is missing.
        """
        return self._measurement.pair(
            foreground=foreground,
            background=background,
            device=self._device.name.partition(":")[0],
            gate=self._gate,
            windows=self._view.windows,
        )

    def leave_for_exec(self) -> None:
        """End the task and let another background have the device."""
        if self._board is not None and self._owner == os.getpid():
            self.withdraw()
            self._board.release_background()

    def return_from_exec(self) -> None:
        """Be the device's background again; close if another one is."""
        if self._board is None or self._owner != os.getpid():
            return
        try:
            self._board.claim_background()
        except BackgroundError as error:
            _log.warning("background on %s closed: %s", self._device.name, error)
            self.close()

    def close(self) -> None:
        """Leave the device, and restore this process's priority where permitted."""
        atexit.unregister(self.close)
        board, self._board = self._board, None
        if board is not None:
            if self._owner == os.getpid():
                self._is_open = False
                self._device.end_task()
            board.release_background()
            board.close()
        if self._owner != os.getpid():  # a forked child, which has no tasks
            return
        self._device.close()
        isolation = getattr(self, "isolation", None)
        if isolation is not None:
            isolation.restore()

    def __enter__(self) -> Background:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


@final
class _Lease:
    """One lease, as a context."""

    __slots__ = ("_background", "_label")

    def __init__(self, background: Background, label: str) -> None:
        self._background, self._label = background, label

    def __enter__(self) -> None:
        self._background.wait(self._label)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._background.end_task()
        else:
            self._background.withdraw()
