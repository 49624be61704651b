"""The memory of a process with all that it has started, for `supervisor`."""

from __future__ import annotations

import os
from pathlib import Path

from stretto.process_identity import descendants_of

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(pid: int, *, above: int) -> int:
    """Return what a process and its descendants use, shared pages counted once.

    Args:
        pid: the process.
        above: less than this need not be exact. Pages that several processes share are
            first counted for each, which takes microseconds; only what is more than
            this is counted again, in milliseconds.
    """
    family = [pid, *descendants_of(pid)]
    resident = sum(map(_resident_bytes, family))
    if resident <= above:
        return resident
    return sum(map(_proportional_bytes, family))


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has ended for memory since its start."""
    try:
        for line in (_PROC / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0


def _resident_bytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _resident_bytes(pid)
