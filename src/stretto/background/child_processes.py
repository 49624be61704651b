"""Processes that a background has started, such as a DataLoader's workers.

They take no leases, so a background counts what they use of the processors.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from stretto.process_identity import descendants_of, stat_fields

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
    pids = descendants_of(os.getpid())
    ticks = sum(_times(os.getpid(), _ENDED))
    ticks += sum(sum(_times(pid, _USED) + _times(pid, _ENDED)) for pid in pids)
    return ChildProcesses(tuple(pids), ticks / os.sysconf("SC_CLK_TCK"))


def _times(pid: int, fields: slice) -> list[int]:
    return [int(ticks) for ticks in (stat_fields(pid) or [])[fields]]
