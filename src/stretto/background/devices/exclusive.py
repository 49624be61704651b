"""An emulated device without preemption: one process at a time computes on it.

It has a queue, as an accelerator has: each launch takes a ticket, and tickets are
served in order. Processes hold the served ticket while they compute. So the cost of
launches that wait in the queue can be measured on any machine.

The queue is a small file that all processes map. It changes under a lock on the file
only, except that a process may withdraw its own tickets at any time. A waiting process
skips tickets that were withdrawn and those of processes that have ended. A process may
be stopped while it holds the lock, so the foreground waits for it with patience.

# Note [Interrupts]
A signal's handler may raise between any two operations. So a process records a ticket
before it is in the queue, and forgets it after it has been withdrawn: its record has
all of its tickets, and `_own_first` leaves out those that the queue does not have.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, final

from stretto import variable_names
from stretto.background.board import (
    as_background_error,
    file_of,
    is_running,
    lock_within,
    own_start,
    require_own_file,
)
from stretto.background.devices.base import AbstractDevice, EndedTask
from stretto.background.priority import Isolation
from stretto.errors import BackgroundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SIZE = 4096
_MAGIC = int.from_bytes(b"strqueue", "big")
_NEXT, _SERVED = 1, 2
_TICKETS_AT, _TICKETS = 8, 250
"""Words of the file; each ticket has a process id (0: withdrawn) and a start time."""

_MAX_NUMBER = 2**63

_POLL_S = 5e-5
_LOOK_EVERY_S = 0.1
_OPEN_S = 10.0
"""How long a process that opens the queue waits for another that changes it."""

_GIVE_BACK_S = 0.01


@final
class ExclusiveDevice(AbstractDevice):
    """A queue of tickets, shared by both processes."""

    is_taken: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        """Open the queue.

        Raises:
            BackgroundError: its file is another program's, or cannot be used.
        """
        super().__init__(name)
        self._path = file_of(name, "queue")
        try:
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as exc:
            raise BackgroundError(
                f"the queue {self._path} cannot be opened ({exc.strerror}): remove it, "
                f"or set {variable_names.RUNTIME_DIR} to another folder"
            ) from exc
        self._lock = threading.RLock()  # see Note [Interrupts]
        self._pid, self._started = os.getpid(), own_start()
        self._tickets: deque[int] = deque()  # of this process, the oldest first
        try:
            require_own_file(self._descriptor, self._path)
            with as_background_error(self._path), self._locked(_OPEN_S) as is_locked:
                self._words = self._mapped(is_locked=is_locked)
        except BaseException:
            os.close(self._descriptor)
            raise
        _opened.add(self)
        self._running: tuple[str, float] | None = None
        self._look_at_s = 0.0
        self._ended: list[EndedTask] = []

    def _mapped(self, *, is_locked: bool) -> memoryview[int]:
        if not is_locked:
            raise BackgroundError(
                f"the queue {self._path} is locked by another process, which may be "
                f"stopped: continue or end it (`fuser {self._path}` shows which)"
            )
        size = os.fstat(self._descriptor).st_size
        magic = int.from_bytes(os.pread(self._descriptor, 8, 0), sys.byteorder)
        if size not in (0, _SIZE) or magic not in (0, _MAGIC):
            raise BackgroundError(f"{self._path} is not a queue: remove it")
        os.posix_fallocate(self._descriptor, 0, _SIZE)
        self._map = mmap.mmap(self._descriptor, _SIZE)
        words = memoryview(self._map).cast("Q")
        words[0] = _MAGIC
        self._withdraw_former(words)
        return words

    def _withdraw_former(self, words: memoryview[int]) -> None:
        """Withdraw what this process took before it became this program by ``exec``."""
        own = {n for one in _opened if one.queue == self.queue for n in one.tickets}
        last = min(words[_NEXT], words[_SERVED] + _TICKETS)
        for number in range(words[_SERVED], last):
            at = _TICKETS_AT + 2 * (number % _TICKETS)
            if (words[at], words[at + 1]) == (self._pid, self._started):
                words[at] *= number in own

    @property
    def queue(self) -> Path:
        """The file of its queue."""
        return self._path

    @property
    def tickets(self) -> tuple[int, ...]:
        """The numbers of this process's tickets, the oldest first."""
        return tuple(self._tickets)

    def isolate(self, foreground_pid: int) -> Isolation:
        """Do nothing: this device has no priorities."""
        del foreground_pid
        return Isolation(
            method="", detail="one process at a time, first come, first served"
        )

    def preempts(self, isolation: Isolation) -> bool:
        """Return ``False``."""
        del isolation
        return False

    # the queue

    @contextlib.contextmanager
    def _locked(self, patience_s: float) -> Iterator[bool]:
        """Lock the queue; ``False`` if another process keeps it locked so long."""
        with self._lock:  # threads share the lock on the file
            try:
                yield lock_within(self._descriptor, patience_s)
            finally:  # an interrupt may come as soon as it is locked
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _reserve(
        self, *, only_free: bool = False, patience_s: float = float("inf")
    ) -> bool:
        """Take a ticket; if asked to, only one that is served at once.

        Returns:
            ``False`` without a ticket: it is not served at once, or patience has ended.
        """
        with self._locked(patience_s) as is_locked:
            if not is_locked:
                return False
            self._skip_withdrawn()
            number = self._words[_NEXT]
            served = self._words[_SERVED]
            if only_free and number != served:
                return False
            if number - served >= _TICKETS:
                raise BackgroundError(
                    f"device {self.name} has {_TICKETS} waiting launches already: end "
                    "some background jobs"
                )
            at = _TICKETS_AT + 2 * (number % _TICKETS)
            self._tickets.append(number)
            self._words[at], self._words[at + 1] = self._pid, self._started
            self._words[_NEXT] = number + 1
        return True

    def _own_first(self) -> int | None:
        """Return this process's oldest ticket in the queue, if it has one."""
        words = self._words

        def is_own(number: int) -> bool:
            at = _TICKETS_AT + 2 * (number % _TICKETS)
            in_queue = words[_SERVED] <= number < words[_NEXT]
            return in_queue and words[at] == self._pid

        if self._tickets:
            self._tickets = deque(n for n in self._tickets if is_own(n))
        return self._tickets[0] if self._tickets else None

    def _skip_withdrawn(self) -> None:
        words = self._words
        last = min(words[_SERVED] + _TICKETS, _MAX_NUMBER)
        if not words[_SERVED] <= words[_NEXT] <= last:
            # Something else has written to the file: all launches are lost. No ticket
            # has had these numbers.
            words[_SERVED] = words[_NEXT] = time.perf_counter_ns()
        while words[_SERVED] < words[_NEXT]:
            if words[_TICKETS_AT + 2 * (words[_SERVED] % _TICKETS)]:
                return
            words[_SERVED] += 1

    def _await(self, number: int, patience_s: float = float("inf")) -> bool:
        """Wait until a ticket is served; ``False`` if it is lost or patience ends."""
        begin_s = perf_counter()
        while (served := self._words[_SERVED]) != number:
            is_lost = not served < number < self._words[_NEXT]
            if is_lost or perf_counter() - begin_s > patience_s:
                return False
            self._look()
            time.sleep(_POLL_S)
        return True

    def _look(self) -> None:
        """Withdraw the served ticket if its process has ended."""
        now_s = perf_counter()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        with self._locked(0.0) as is_locked:
            if not is_locked:
                return
            at = _TICKETS_AT + 2 * (self._words[_SERVED] % _TICKETS)
            if not is_running(self._words[at], self._words[at + 1]):
                self._words[at] = 0
            self._skip_withdrawn()

    def _give_back(self, index: int) -> None:
        """Withdraw one of this process's tickets: 0 is the oldest, -1 the newest."""
        at = _TICKETS_AT + 2 * (self._tickets[index] % _TICKETS)
        if self._words[at] == self._pid:
            self._words[at] = 0
        del self._tickets[index]
        with self._locked(_GIVE_BACK_S) as is_locked:
            if is_locked:  # else a process that waits for the device skips it
                self._skip_withdrawn()

    # the background's side

    def start_task(self, label: str, *, waits: bool, depth: int) -> bool:
        """Get the device, with further launches in the queue up to the depth."""
        first = self._own_first()
        if not waits:
            if first is not None and first != self._words[_SERVED]:
                self.withdraw()  # launched when tasks might wait in the queue
                return False
            if first is None and not self._reserve(only_free=True):
                self._look()
                return False
        else:
            try:
                while not self._reaches(depth):
                    self._own_first()  # forgets those that are lost
            except BaseException:  # an interrupt, which the program may catch
                self.withdraw()
                raise
        self._running = label, perf_counter()
        return True

    def _reaches(self, depth: int) -> bool:
        """Have as many tickets as the depth; return whether the first one is served."""
        while len(self._tickets) < depth:
            self._reserve()
        return self._await(self._tickets[0])

    def end_task(self) -> None:
        """Serve the next ticket."""
        if self._running is not None:
            label, begin_s = self._running
            now_s = perf_counter()
            self._running = None
            if self._own_first() is not None:
                self._give_back(0)
            self._ended.append(EndedTask(label, now_s - begin_s, now_s))

    def withdraw(self) -> None:
        """Withdraw launches that have not begun."""
        while len(self._tickets) > int(self._running is not None):
            self._give_back(-1)

    def ended(self) -> list[EndedTask]:
        """Return the tasks that have ended since the last call."""
        found, self._ended = self._ended, []
        return found

    @property
    def outstanding(self) -> int:
        """One within a task; launches that wait are not yet tasks."""
        return int(self._running is not None)

    # the foreground's side

    def take(self, *, patience_s: float = float("inf")) -> bool:
        """Get the device after what was launched before."""
        try:
            if self._own_first() is None and not self._reserve(patience_s=patience_s):
                return False
        except BackgroundError:  # the foreground trains on whatever others do
            self._look()
            time.sleep(min(patience_s, _LOOK_EVERY_S))
            return False
        return self._await(self._tickets[0], patience_s)

    def release(self) -> None:
        """Serve the next ticket."""
        while self._tickets:
            self._give_back(0)

    def close(self) -> None:
        """Return all tickets."""
        if self._descriptor < 0:
            return
        if self._pid == os.getpid():
            self.release()
        self._words.release()
        self._map.close()
        os.close(self._descriptor)
        self._descriptor = -1


_opened: weakref.WeakSet[ExclusiveDevice] = weakref.WeakSet()
