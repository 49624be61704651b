"""The foreground's side of a board: marks for a background that may be beside it.

`Foreground` writes to a board what training code reports through
`stretto.foreground_marks`, or what a training loop reports itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, final

from stretto import foreground_marks
from stretto.background.board import (
    COMMUNICATING,
    COMPUTING,
    READER,
    WAITING,
    Board,
)
from stretto.background.devices import open_device
from stretto.background.program_change import leave_at_exec
from stretto.errors import BackgroundError, SpecError
from stretto.foreground_marks import StepMarker
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from stretto.background.board import BackgroundStatus
    from stretto.background.windows import Window

_log = get_logger(__name__)

_LOOK_EVERY_S = 1.0
_OVERRUN = 10.0
"""A lease this many times as long as usual, and `_MIN_OVERRUN_S`, is reported."""

_MIN_OVERRUN_S = 1.0
_KILL_AFTER_S = 5.0
_BUSY = 0.05
"""Share of a processor above which a process computes."""

_VERY_BUSY = 0.5
"""The same for one that may look at the board all the time, while it waits."""

_LEASELESS_S = 10.0
"""Time for which a background computes without a lease before that is reported."""

_OTHER_STEPS = 8
"""Steps of another model without one of the model that has marked steps so far, after
which the other marks them."""


@final
class Foreground:
    """Lets a background use a device while this process waits.

        with stretto.Foreground("cuda:0") as foreground:
            for batch in loader:
                foreground.step()
                ...
                with foreground.waiting("all-reduce"):
                    work.wait()

    While it is open, `stretto.DistributedDataParallel`, `stretto.BurstParallel` and
    Horovod's `DistributedOptimizer` mark their steps and waits by themselves, so the
    loop only has to mark what else it waits for. If a process has several open, for
    several devices, they mark on all: each is idle while the process waits. Marks are
    written only while a background reads them. A background that holds a device much
    longer than usual, which the foreground can't take from it, is reported, and ended
    after ``stop_after_s``.
    """

    def __init__(
        self,
        device: str,
        *,
        windows: Sequence[Window] = (),
        stop_after_s: float | None = 60.0,
    ) -> None:
        """Claim a device.

        Args:
            device: for instance ``cpu``, ``cuda:0``, ``exclusive:NAME``.
            windows: those that a prediction gives each step; else they are learned.
            stop_after_s: end a background whose lease exceeds its usual length tenfold
                and this time, if it keeps the device from this process; ``None`` never
                does.

        Raises:
            SpecError: an argument is invalid.
            BackgroundError: another process is this device's foreground.
        """
        if stop_after_s is not None and not stop_after_s > 0.0:
            raise SpecError(f"stop_after_s must be positive, got {stop_after_s:g}")
        self._device = open_device(device)
        self._board = Board(device)
        try:
            self._board.claim_foreground()
        except BaseException:
            self._board.close()
            self._device.close()
            raise
        self._words = self._board.words
        self._step = 0
        self._source: Callable[[], object | None] = _no_source
        self._other_steps = 0
        self._stop_after_s = stop_after_s
        self._look_at_s = 0.0
        self._reported: tuple[int, float] | None = None
        self._ended: tuple[int, float] | None = None
        self._processor = 0, 0.0, 0.0
        self._leaseless_from_s, self._tasks_seen = 0.0, (0, -1)
        self._has_warned_of = 0
        self._waits = 0
        self._waits_lock = threading.Lock()
        self._takes = False
        self._begins = self._device.is_taken
        self._is_closed = False
        self.set_windows(windows)
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            own = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _leave_to_parent(own()))
        foreground_marks.add(self)
        _opened.add(self)
        leave_at_exec(self)

    @property
    def device_name(self) -> str:
        """The name of its device."""
        return self._device.name

    def set_windows(self, windows: Sequence[Window]) -> None:
        """Set the windows that a prediction gives each step from now on."""
        if not self._is_closed:
            self._board.set_windows(windows)

    @property
    def is_read(self) -> bool:
        """Whether a background reads the marks."""
        return not self._is_closed and self._board.is_read

    @property
    def background(self) -> tuple[int, BackgroundStatus] | None:
        """The background's process id and what it published; ``None`` without one."""
        return None if self._is_closed else self._board.background()

    def step(self, source: object = None) -> None:
        """Mark the start of a step; the device computes from now on.

        Args:
            source: the model that begins it. If several models begin steps, those of
                the first count, and no model's if the training loop marks them itself.
        """
        if not self._counts(source):
            return
        # Ranks agree on the number of a model's step, whenever each has opened this.
        if isinstance(source, StepMarker):
            self._step = source.steps
        else:
            self._step += 1
        if self._words[READER]:  # a background reads
            self._board.mark(self._step, COMPUTING)
            if perf_counter() > self._look_at_s:
                self._look()
        if self._begins:
            self._begins = False
            self._takes = True
            self._take()

    def _counts(self, source: object) -> bool:
        """Return whether a step of this source counts."""
        now = self._source()
        if now is source and source is not None:
            self._other_steps = 0
            return True
        if source is None:
            self._source = _training_loop
            return True
        if now is _LOOP:
            return False
        self._other_steps += 1
        if now is not None and self._other_steps < _OTHER_STEPS:
            return False
        self._source, self._other_steps = weakref.ref(source), 0
        if isinstance(source, StepMarker) and (now is not None or source.windows):
            self.set_windows(source.windows)
        return True

    def predict(self, source: object, windows: Sequence[Window]) -> None:
        """Set the windows of a model's steps, if the model marks the steps."""
        if self._source() is source:
            self.set_windows(windows)

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        """Mark that the device is idle until `end_wait`.

        Args:
            what: what is waited for; waits of one kind have about one length.
            uses_device: whether the communication itself uses the device.
        """
        with self._waits_lock:
            self._waits += 1
            if self._waits > 1:
                return
        if self._takes:
            self._device.release()
        if self._words[READER]:
            state = COMMUNICATING if uses_device else WAITING
            self._board.mark(self._step, state, self._board.kind_number(what))

    def end_wait(self) -> None:
        """Mark that the device computes again."""
        with self._waits_lock:
            self._waits -= 1
            if self._waits:
                return
        if self._words[READER]:
            self._board.mark(self._step, COMPUTING)
        if self._takes:
            self._take()

    @contextlib.contextmanager
    def waiting(self, what: str, *, uses_device: bool = False) -> Iterator[None]:
        """Mark a wait; see `begin_wait`."""
        self.begin_wait(what, uses_device=uses_device)
        try:
            yield
        finally:
            self.end_wait()

    def _take(self) -> None:
        begin_s = perf_counter()
        while not self._device.take(patience_s=_LOOK_EVERY_S):
            self._look(blocked_since_s=begin_s)

    def _look(self, *, blocked_since_s: float = 0.0) -> None:
        """Look for a background that has ended, or that ignores its lease."""
        now_s = perf_counter()
        self._look_at_s = now_s + _LOOK_EVERY_S
        self._board.clear_ended_reader()
        found = self._board.background()
        if found is None or not self._board.background_runs():
            return
        pid, status = found
        # A process that was stopped may hold the device without a lease.
        begin_s = status.lease_begin_s or blocked_since_s
        if status.is_preempted:
            return
        if not begin_s:
            self._look_without_lease(pid, status, now_s)
            return
        held_s = now_s - begin_s
        computes = self._device.is_processor and self._computes(pid, now_s)
        if held_s < max(_OVERRUN * status.usual_s, _MIN_OVERRUN_S):
            return
        lease = (pid, begin_s)
        if self._reported != lease:
            self._reported = lease
            _log.warning(
                "the background of %s, process %d, is in one lease for %.1f s; %s",
                self._device.name,
                pid,
                held_s,
                f"its tasks usually take {status.usual_s:.3g} s"
                if status.usual_s
                else "no task of it has ended yet",
            )
        limit_s = self._stop_after_s
        keeps = computes or blocked_since_s
        if keeps and limit_s is not None and held_s > limit_s:
            self._stop(lease)

    def _look_without_lease(
        self, pid: int, status: BackgroundStatus, now_s: float
    ) -> None:
        """Report a background that computes for long and takes no leases."""
        computes = self._computes(pid, now_s, share=_VERY_BUSY)
        before, self._tasks_seen = self._tasks_seen, (pid, status.tasks)
        if not computes or before != self._tasks_seen:
            self._leaseless_from_s = now_s
        elif (
            now_s - self._leaseless_from_s > _LEASELESS_S and self._has_warned_of != pid
        ):
            self._has_warned_of = pid
            _log.warning(
                "the background of %s, process %d, has computed for %.0f s without a "
                "lease, whatever this process did",
                self._device.name,
                pid,
                now_s - self._leaseless_from_s,
            )

    def _computes(self, pid: int, now_s: float, *, share: float = _BUSY) -> bool:
        """Return whether a process has computed since the last look."""
        before_pid, before_s, before_used_s = self._processor
        try:
            # The processor time of another process, see clock_getcpuclockid(3).
            used_s = time.clock_gettime((~pid << 3) | 2)
        except OSError:
            return False
        self._processor = pid, now_s, used_s
        return before_pid == pid and used_s - before_used_s > share * (now_s - before_s)

    def _stop(self, lease: tuple[int, float]) -> None:
        pid, now_s = lease[0], perf_counter()
        if self._ended is None or self._ended[0] != pid:
            self._ended = pid, now_s
            _log.warning(
                "ending the background of %s, process %d: it ignores its lease",
                self._device.name,
                pid,
            )
            number = signal.SIGTERM
        elif now_s - self._ended[1] > _KILL_AFTER_S:
            number = signal.SIGKILL
        else:
            return
        with contextlib.suppress(OSError):
            os.kill(pid, number)

    def leave_for_exec(self) -> None:
        """Leave the device to a background."""
        if not self._is_closed:
            self._device.release()
            self._board.release_foreground()

    def return_from_exec(self) -> None:
        """Be the device's foreground again; close if another process is."""
        if self._is_closed:
            return
        try:
            self._board.claim_foreground()
        except BackgroundError as error:
            _log.warning("no background can run beside this process: %s", error)
            self.close()
        else:
            self._begins = self._device.is_taken

    def close(self) -> None:
        """Leave the device to a background."""
        atexit.unregister(self.close)
        if self._is_closed:
            return
        self._is_closed = True
        foreground_marks.remove(self)
        _opened.discard(self)
        self._ignore_marks()
        self._device.close()
        self._board.release_foreground()
        self._board.close()

    def _ignore_marks(self) -> None:
        """Do nothing from now on."""
        self._takes = self._begins = False
        self._words = memoryview(bytes(64)).cast("Q")

    def leave_to_parent(self) -> None:
        """Do nothing from now on: this is a forked child, and the device its parent's.

        The device's queue knows the parent's launches only.
        """
        self._is_closed = True
        _opened.discard(self)
        self._ignore_marks()

    def __enter__(self) -> Foreground:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the device to a background."""
        self.close()


_opened: weakref.WeakSet[Foreground] = weakref.WeakSet()


def is_opened(device: str) -> bool:
    """Return whether this process is a device's foreground."""
    return any(one.device_name == device for one in _opened)


def has_opened() -> bool:
    """Return whether this process is the foreground of any device."""
    return bool(_opened)


def _leave_to_parent(foreground: Foreground | None) -> None:
    if foreground is not None:
        foreground.leave_to_parent()


_LOOP = object()
"""Source of the steps of a training loop that marks them itself."""


def _training_loop() -> object:
    return _LOOP


def _no_source() -> None:
    return None
