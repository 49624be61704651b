"""Measure how much of the machine's processors other programs use, on Linux."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from time import perf_counter
from typing import final

BUSY_CORES = 0.25
"""From this many cores in use by others, times are those of a busy machine."""


@final
class OthersLoad:
    """Processor time that programs other than this one and its children used.

    Children count only after they were waited for, so read it when they have ended.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin_s = perf_counter()
        self._busy_s = self._all_busy_s()
        self._own_s = _own_s()

    def cores(self) -> float | None:
        """Return the mean number of cores in use by others; None where unknown."""
        busy_s = self._all_busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        elapsed_s = perf_counter() - self._begin_s
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s) / elapsed_s

    def _all_busy_s(self) -> float | None:
        """Return the seconds of all cores in user, nice and system mode since boot."""
        try:
            words = self._stat.read_text().split()
            ticks = sum(map(int, words[1:4]))
        except (OSError, ValueError):
            return None
        return float(ticks) / float(os.sysconf("SC_CLK_TCK"))


def _own_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(
            resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
    )


def busy_note(cores: float | None) -> str | None:
    """Return a sentence about a machine that others keep busy, or None."""
    if cores is None or cores < BUSY_CORES:
        return None
    return (
        f"Other programs used {cores:.1f} of this machine's {os.cpu_count()} cores in "
        "the meantime: times are longer and vary more than on a quiet machine."
    )
