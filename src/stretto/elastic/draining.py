"""Whether this rank was asked to leave its job: by SIGTERM, its keeper or its program.

# Note [A rank leaves between two steps]
A rank that is to leave says so in the all-reduce that compares parameters (`digests`),
whose result all ranks read after the same step. They then exchange who leaves, and act
before the next batch. So all have committed the same steps, and no rank waits for one
that has left. With a keeper, the others follow the next membership, which has no loss
in it. Where too few would be left, or there is no keeper, all ranks leave, and rank 0
writes a snapshot before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from types import FrameType

STATUS = 128 + signal.SIGTERM
"""Exit status of a rank that has left, as a shell's for SIGTERM."""

_SAME_S = 1.0
"""Signals within this time are one request: of a scheduler and of a launcher."""

_current: weakref.ref[Drain] | None = None
"""The drain that SIGTERM requests."""


@final
class Drain:
    """Notes a request to leave; any thread may make it."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.is_wanted = False
        self._asked_s = 0.0
        self._process = os.getpid()

    def ask(self) -> None:
        """Let this rank leave."""
        if not self.is_wanted:
            self._asked_s = time.monotonic()
            self.is_wanted = True

    def listen(self) -> bool:
        """Let SIGTERM ask; return false if the program handles it, or in a thread."""
        global _current  # a process has one handler
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _on_signal):
            return False
        _current = weakref.ref(self)
        signal.signal(signal.SIGTERM, _on_signal)
        return True

    def takes_signal(self) -> bool:
        """Note a signal; return false if it is to end the process at once."""
        if os.getpid() != self._process:
            return False  # a forked process, such as a pool's
        if self.is_wanted and time.monotonic() > self._asked_s + _SAME_S:
            return False
        self.ask()
        return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    drain = None if _current is None else _current()
    if drain is None or not drain.takes_signal():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
