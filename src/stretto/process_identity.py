"""Identify a process of this host reliably, although process ids are reused.

Also a process's row in ``/proc``, and what it has started.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


class ProcessState(enum.Enum):
    """The known state of another process."""

    RUNS = "still runs"
    STOPPED = "is stopped by a signal"
    ENDED = "has ended"
    UNKNOWN = "is on another host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a process on any host."""

    host: str
    """The host's name, for messages."""

    kernel: str
    """The boot and namespace of ``pid``; empty if unknown."""

    pid: int

    started: str
    """Start time of the process, in the kernel's own units; empty if unknown."""


def host_name() -> str:
    """Return this host's name, for messages and records; it never raises.

    `socket.gethostname` raises where a program or its tests forbid the network.
    """
    return platform.node() or "localhost"


def own_identity() -> Identity:
    """Return this process's identity."""
    pid = os.getpid()
    row = stat_row(pid)
    return Identity(
        host=host_name(),
        kernel=kernel_id(),
        pid=pid,
        started="" if row is None else row[1],
    )


def boot_id() -> str:
    """Return what no other start of this host has.

    Raises:
        OSError: it is unknown.
    """
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def kernel_id() -> str:
    """Return the boot and the namespace of process ids; empty if unknown."""
    try:
        return f"{boot_id()} {os.readlink(_PROC / 'self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return "" if sys.platform == "linux" else f"{sys.platform} {host_name()}"


def state_of(process: Identity) -> ProcessState:
    """Return the state of another process as seen by this one."""
    if not process.kernel or process.kernel != kernel_id():
        return ProcessState.UNKNOWN
    row = stat_row(process.pid)
    if row is None:
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return ProcessState.ENDED
        except OSError:  # it belongs to another user
            return ProcessState.RUNS
        return ProcessState.RUNS
    letter, started = row
    if started != process.started or letter in "ZXx":
        return ProcessState.ENDED
    return ProcessState.STOPPED if letter in "Tt" else ProcessState.RUNS


def stat_row(pid: int) -> tuple[str, str] | None:
    """Return a process's state letter and start, or ``None`` if it can't be read."""
    fields = stat_fields(pid)
    return None if fields is None else (fields[0], fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """Return a process's row from its state letter on; ``None`` if it can't be read."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # a name may contain spaces and brackets


def process_ids() -> list[int]:
    """Return the ids of all processes.

    Raises:
        OSError: the system does not list them.
    """
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent is a process, ended ones included."""
    rows = ((child, stat_fields(child)) for child in process_ids())
    return [child for child, row in rows if row is not None and int(row[1]) == pid]


def descendants_of(pid: int) -> list[int]:
    """Return what a process and its descendants have started and still runs.

    It looks at these processes only, so it is faster than `children_of`; it finds none
    where the kernel does not list children.
    """
    found, left = [], _listed_children(pid)
    while left:
        found.append(left.pop())
        left += _listed_children(found[-1])
    return found


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / f"{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
