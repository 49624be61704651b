"""Memory that the ranks of one host share, and how they wait for each other in it.

# Note [Steps and slots]
A rank publishes the number of the last step that it has entered. In each step it may
write one of its two slots, and read those of the others. When a rank has entered step
k, it has read everything that it needs of steps before k. So a rank may write for step
k (into slot k modulo 2) once all others have entered step k - 1: the last readers of
that slot, in step k - 2, are done. Each number is written by one rank only, so no
atomic read-modify-write is needed.

# Note [Waiting without spinning]
A rank that has to wait sleeps in the kernel (``futex``) on the awaited rank's number,
whose owner wakes all sleepers when it changes it. Every ``TICK_S`` a sleeper checks
that the others' processes still exist. Where the system call's number is not known,
waiting polls with growing pauses.

# Note [Order of writes]
Data must be visible before the number that announces it. Writes of an x86 processor
become visible in order; others may reorder them around a plain store. Acquiring and
releasing a lock twice orders them on every processor: nothing moves up across the
second acquisition, and nothing moves down across the first release.

# Note [Memory without a name]
The memory is a ``memfd``: the first rank creates it, the others open it through that
process's entry in /proc, and all close it once it is mapped. It never has a name in a
file system, so nothing is left after a crash, and it does not count against the size
of /dev/shm, which is 64 MiB in many containers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import threading
import time
from typing import TYPE_CHECKING, final

import numpy

from stretto.errors import RankDisagreement
from stretto.process_identity import ProcessState, state_of
from stretto.runtime.backends.base import LaneFailure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from stretto.process_identity import Identity
    from stretto.runtime.ranks import Ranks

TICK_S = 0.2
SLOT_BYTES = 512 * 1024
DEPTH = 2

_LINE_BYTES = 512
"""Per rank: its step, its state, and why it has left; apart from other ranks' cache
lines."""

_NOTE_AT = 64
_TOKEN_BYTES = 16
DESCRIPTION_BYTES = 64
"""At the start of each slot."""

_OPEN, _CLOSED, _FAILED = 0, 1, 2

_FUTEX_NUMBERS = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
"""Number of the system call, by machine; those with 64-bit times and pointers."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 2e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_system = ctypes.CDLL(None, use_errno=True)
_number = _FUTEX_NUMBERS.get(platform.machine(), 0)


def create_memory(name: str, size_bytes: int) -> int:
    """Return a descriptor of new memory, all of it available.

    Raises:
        OSError: the process may not have it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        # Without this a process that touches a missing page is killed by a signal.
        os.posix_fallocate(descriptor, 0, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_memory(process: Identity, descriptor: int) -> int:
    """Return an own descriptor of memory that another process of this host holds.

    Raises:
        OSError: the process is gone, or belongs to another user.
    """
    return os.open(f"/proc/{process.pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def segment_bytes(ranks: int) -> int:
    """Return the size of one lane's memory."""
    return _data_at(ranks) + ranks * DEPTH * SLOT_BYTES


def new_token() -> bytes:
    """Return bytes by which ranks recognize their memory."""
    return secrets.token_bytes(_TOKEN_BYTES)


def _data_at(ranks: int) -> int:
    page = mmap.PAGESIZE
    return -(-(_LINE_BYTES * (ranks + 1)) // page) * page


@final
class SharedSegment:
    """One lane's memory in one rank.

    Only the lane's current thread may call the methods that enter steps or wait; any
    thread may call `fail`.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        ranks: Ranks,
        processes: Sequence[Identity],
        label: str,
    ) -> None:
        """Map the memory.

        Args:
            descriptor: Of the memory; may be closed afterward.
            ranks: The lane's ranks.
            processes: Their processes, by rank.
            label: The lane's name in messages.

        Raises:
            OSError: it can't be mapped.
        """
        size = ranks.size
        memory = mmap.mmap(descriptor, segment_bytes(size))
        self._bytes = numpy.frombuffer(memory, dtype=numpy.uint8)
        self._words = memoryview(memory).cast("I")
        self._address: int = self._bytes.ctypes.data
        self._ranks, self._processes, self._label = ranks, processes, label
        self._others = [(ranks.rank + i) % size for i in range(1, size)]
        first = _data_at(size)
        starts = [first + i * SLOT_BYTES for i in range(size * DEPTH)]
        self._slots = [self._bytes[at : at + SLOT_BYTES] for at in starts]
        self._step = self._words[self._word(ranks.rank)]
        self._lock = threading.Lock()
        self._error: str | None = None
        self._process = os.getpid()

    # Setting up.

    def stamp(self, token: bytes) -> None:
        """Mark the memory as that of this lane."""
        self._bytes[:_TOKEN_BYTES] = numpy.frombuffer(token, numpy.uint8)

    def stamped(self, token: bytes) -> bool:
        """Return whether the memory is marked with ``token``."""
        return self._bytes[:_TOKEN_BYTES].tobytes() == token

    # Steps. See Note [Steps and slots].

    def begin(self) -> numpy.ndarray[Any, Any]:
        """Wait until this rank's slot for the next step is free; return it."""
        for rank in self._others:
            self._await(rank, self._step)
        return self._slot(self._ranks.rank, self._step + 1)

    def enter(self) -> None:
        """Enter the next step: what was written for it may now be read."""
        self._fence()
        step = self._step = (self._step + 1) & 0xFFFFFFFF
        word = self._word(self._ranks.rank)
        self._words[word] = step
        self._wake(word)

    def read(self, rank: int) -> numpy.ndarray[Any, Any]:
        """Return a rank's slot of the current step, once that rank has entered it."""
        if rank != self._ranks.rank:
            self._await(rank, self._step)
        return self._slot(rank, self._step)

    @property
    def others(self) -> Sequence[int]:
        """The other ranks, beginning with the next one."""
        return self._others

    def _slot(self, rank: int, step: int) -> numpy.ndarray[Any, Any]:
        return self._slots[rank * DEPTH + step % DEPTH]

    def _word(self, rank: int) -> int:
        return (rank + 1) * _LINE_BYTES // 4

    # Waiting. See Note [Waiting without spinning].

    def _await(self, rank: int, step: int) -> None:
        """Sleep until a rank has entered a step.

        Raises:
            LaneFailure: a rank has left the lane or ended, or time ran out.
        """
        word = self._word(rank)
        if not _reached(self._words[word], step):
            self._sleep(rank, word, step)
        self._fence()

    def _sleep(self, rank: int, word: int, step: int) -> None:
        deadline = time.perf_counter() + self._ranks.timeout_s
        look_s, pause_s = time.perf_counter() + TICK_S, _MIN_PAUSE_S
        while not _reached(seen := self._words[word], step):
            if self._error is not None:
                raise LaneFailure(self._error)
            now_s = time.perf_counter()
            if self._words[word + 1] != _OPEN or now_s >= min(look_s, deadline):
                lost = self._lost(step)
                # A rank may have entered the step just before it left.
                if _reached(self._words[word], step):
                    return
                if lost:
                    raise self._failure(f"{self._label} lost its peer: {lost}")
                if now_s >= deadline:
                    raise self._failure(self._late(rank))
                look_s = now_s + TICK_S
            if not _number:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)
            else:
                limit_s = max(0.0, min(TICK_S, deadline - now_s))
                timeout = _Timespec(0, int(limit_s * 1e9))
                self._futex(word, _FUTEX_WAIT, seen, ctypes.byref(timeout))

    def _wake(self, word: int) -> None:
        if _number:
            self._futex(word, _FUTEX_WAKE, _ALL, None)

    def _futex(self, word: int, operation: int, value: int, timeout: Any) -> None:
        # Its errors (the value has changed, a timeout, a signal) are found by the next
        # look at the value.
        _system.syscall(
            ctypes.c_long(_number),
            ctypes.c_void_p(self._address + 4 * word),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            ctypes.c_uint32(0),
        )

    def _fence(self) -> None:
        with self._lock:
            pass
        with self._lock:
            pass

    # Failing and leaving.

    def _lost(self, step: int) -> str:
        """Return why a step can't be entered by all ranks; empty if it may be.

        A rank that has entered it may have ended or closed the lane since.
        """
        names = self._ranks.name
        missing = [r for r in self._others if not self._has_entered(r, step)]
        ended = [
            f"{names(r)} is gone (process {self._processes[r].pid} on "
            f"{self._processes[r].host} has ended)"
            for r in missing
            # Look again: it may have entered the step just before it ended.
            if state_of(self._processes[r]) is ProcessState.ENDED
            and not self._has_entered(r, step)
        ]
        if ended:
            return "; ".join(ended)
        for rank in self._others:
            state = self._words[self._word(rank) + 1]
            if state == _FAILED:
                return self._left(rank)
            if state == _CLOSED and not self._has_entered(rank, step):
                return f"{names(rank)} has closed the lane"
        return ""

    def _left(self, rank: int) -> str:
        return f"{self._ranks.name(rank)} gave up: {self._note(rank)}"

    def _has_entered(self, rank: int, step: int) -> bool:
        return _reached(self._words[self._word(rank)], step)

    def _late(self, rank: int) -> str:
        process = self._processes[rank]
        return (
            f"{self._label} timed out: {self._ranks.name(rank)} (process "
            f"{process.pid} on {process.host}, which {state_of(process).value}) did "
            f"not arrive within {self._ranks.timeout_s:g} s"
        )

    def _failure(self, text: str) -> LaneFailure:
        self.fail(text)
        return LaneFailure(self._error or text)

    def disagree(self, text: str) -> RankDisagreement:
        """Fail because ranks make different calls; return the error to raise."""
        self.fail(text)
        return RankDisagreement(text)

    def require_open(self) -> None:
        """Raise the error that ended the lane here or on another rank, if any.

        Raises:
            LaneFailure: an earlier collective failed, or the lane was aborted.
        """
        if self._error is not None:
            raise LaneFailure(self._error)
        for rank in self._others:
            # Its last values may be there, but it has not got this rank's.
            if self._words[self._word(rank) + 1] == _FAILED:
                raise self._failure(f"{self._label} lost its peer: {self._left(rank)}")

    def fail(self, text: str) -> None:
        """Make this rank's collectives fail, and those of ranks that wait for it.

        Later calls change nothing.

        Does nothing in a forked process, which shares the memory, or after `leave`.
        """
        if os.getpid() != self._process:
            return  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._error is not None:
                return
            self._error = text
            self._announce(_FAILED, text)

    def leave(self) -> None:
        """Leave the lane and free this rank's mapping."""
        with self._lock:
            if os.getpid() == self._process and self._error is None:
                self._error = f"{self._label} is closed"
                self._announce(_CLOSED, "")
            self._slots = []
            self._bytes = numpy.empty(0, numpy.uint8)
            self._words = memoryview(b"").cast("I")

    def _announce(self, state: int, note: str) -> None:
        """Publish why this rank has left, and wake everything that waits for it."""
        mine = self._word(self._ranks.rank)
        text = note.encode()[: _LINE_BYTES - _NOTE_AT - 1] + b"\0"
        at = 4 * mine + _NOTE_AT
        self._bytes[at : at + len(text)] = numpy.frombuffer(text, numpy.uint8)
        self._words[mine + 1] = state
        for rank in range(self._ranks.size):
            # This rank's own thread may wait for any of them.
            self._wake(self._word(rank))

    def _note(self, rank: int) -> str:
        at = 4 * self._word(rank) + _NOTE_AT
        text = self._bytes[at : at + _LINE_BYTES - _NOTE_AT].tobytes()
        return text.partition(b"\0")[0].decode(errors="replace")


def _reached(seen: int, step: int) -> bool:
    """Return whether a rank at step ``seen`` has entered ``step``; both wrap around."""
    return (seen - step) & 0xFFFFFFFF < 2**31


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that may be closed already."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
