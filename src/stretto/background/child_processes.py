"""Processes that a background has started, such as a DataLoader's workers.

They take no leases, so a background counts what they use of the processors.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_USED, _ENDED = slice(11, 13), slice(13, 15)
"""Fields of a process's times: its own, and those of its ended children."""


class ChildProcesses(NamedTuple):
    """A look at the processes that descend from this one."""

    pids: tuple[int, ...]
    """The processes that run."""

    used_s: float
    """Their processor time so far, and that of those that have ended."""


def child_processes() -> ChildProcesses:
    """Return the processes that descend from this one.

    Without a kernel that lists children only the time of those that have ended.
    """
    ticks = sum(_times(os.getpid(), _ENDED))
    pids: list[int] = []
    left = _children(os.getpid())
    while left:
        pid = left.pop()
        pids.append(pid)
        ticks += sum(_times(pid, _USED)) + sum(_times(pid, _ENDED))
        left += _children(pid)
    return ChildProcesses(tuple(pids), ticks / os.sysconf("SC_CLK_TCK"))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / f"{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _times(pid: int, fields: slice) -> list[int]:
    try:
        text = (_PROC / f"{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return [int(ticks) for ticks in text.rpartition(")")[2].split()[fields]]
