"""An event loop in one thread: descriptors, timers, ended children.

The cluster's processes fork, and a fork is safe only in a process with one thread and
without another's event loop; so this module is all they wait with.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable


_PAUSE_S = 0.2
"""After calls that took longer, descriptors come before further timers."""

_MAX_READS = 3
"""Timers fire after as many looks at descriptors, however long these take."""


def now_s() -> float:
    """Return the time since the host's start, suspension included.

    No change of the wall clock moves it. Watchdogs fire while a host is suspended.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> float:
    """Return the wall clock's time, which may jump."""
    return time.clock_gettime(time.CLOCK_REALTIME)


@final
class Timer:
    """A call at a later time."""

    __slots__ = ("_call", "at_s")

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self._call = None

    @property
    def is_canceled(self) -> bool:
        """Whether it will not be called, or has been."""
        return self._call is None

    def fire(self) -> None:
        """Call now, unless it is canceled; it counts as canceled from now on."""
        call, self._call = self._call, None
        if call is not None:
            call()


@final
class Loop:
    """Calls back when a descriptor is ready or a time has come.

    # Note [Reads before timers]
    A timer may be about what has not arrived, such as heartbeats. So what has arrived
    is read before timers fire, and after a pause of the process, which may be in a wait
    or in a call, before further ones do.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._is_stopped = False
        self._wake: tuple[int, int] | None = None

    def watch(
        self,
        descriptor: int,
        *,
        read: Callable[[], object] | None = None,
        write: Callable[[], object] | None = None,
    ) -> None:
        """Call when a descriptor is ready; replaces what was watched of it."""
        events = (selectors.EVENT_READ if read else 0) | (
            selectors.EVENT_WRITE if write else 0
        )
        if not events:
            self.unwatch(descriptor)
            return
        try:
            self._selector.modify(descriptor, events, (read, write))
        except KeyError:
            self._selector.register(descriptor, events, (read, write))

    def unwatch(self, descriptor: int) -> None:
        """Watch a descriptor no longer."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def call_in(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once after a delay."""
        timer = Timer(now_s() + delay_s, call)
        heapq.heappush(self._timers, (timer.at_s, next(self._numbers), timer))
        return timer

    def every(self, period_s: float, call: Callable[[], None]) -> None:
        """Call again and again, the first time after one period."""

        def again() -> None:
            self.call_in(period_s, again)
            call()

        self.call_in(period_s, again)

    def on_signals(self, handlers: dict[int, Callable[[], None]]) -> None:
        """Call handlers in the loop, not within the signal."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake = read, write
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in handlers:
            signal.signal(number, lambda *_: None)

        def wake() -> None:
            try:
                numbers = set(os.read(read, 4096))
            except BlockingIOError:
                return
            for number in numbers:
                if number in handlers:
                    handlers[number]()

        self.watch(read, read=wake)

    def run(self) -> None:
        """Run until `stop`."""
        while not self._is_stopped:
            self.turn()

    def turn(self, at_most_s: float | None = None) -> None:
        """Wait for the next event or timer, and call back."""
        wait_s = at_most_s
        while self._timers and self._timers[0][2].is_canceled:
            heapq.heappop(self._timers)
        if self._timers:
            due_s = max(0.0, self._timers[0][0] - now_s())
            wait_s = due_s if wait_s is None else min(wait_s, due_s)
        self._call_ready(wait_s)
        rounds = 0
        while rounds < _MAX_READS and self._is_due():
            rounds += 1
            if self._call_ready(0.0) <= _PAUSE_S:
                break
        now = now_s()
        while self._is_due(now):
            heapq.heappop(self._timers)[2].fire()
            if now_s() - now > _PAUSE_S:
                break

    def _is_due(self, by_s: float | None = None) -> bool:
        by_s = now_s() if by_s is None else by_s
        return bool(self._timers) and self._timers[0][0] <= by_s

    def _call_ready(self, wait_s: float | None) -> float:
        """Wait for descriptors and call back; return how long that took."""
        began_s = now_s()
        for key, events in self._selector.select(wait_s):
            read, write = key.data
            # An earlier call of this turn may have closed it.
            if self._selector.get_map().get(key.fileobj) is not key:
                continue
            if events & selectors.EVENT_READ and read is not None:
                read()
            elif events & selectors.EVENT_WRITE and write is not None:
                write()
        return now_s() - began_s

    def stop(self) -> None:
        """End `run` after this turn."""
        self._is_stopped = True

    def close_in_child(self) -> None:
        """Release everything in a forked child, whose parent keeps it."""
        signal.set_wakeup_fd(-1)
        self._selector.close()  # a copy: the parent's set of descriptors stays
        self._timers.clear()
        self._is_stopped = True
