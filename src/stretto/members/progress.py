"""A rank's activity, on a page of memory that its host's keeper reads.

A rank that computes for too long while others wait for it hangs, as far as anyone can
tell from outside: it runs, and its host sends beats. The page says since when it has
been doing what, which costs the rank no system call. Only a rank within an epoch is
judged; evaluation between epochs has no limit.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from pathlib import Path


_ROW = struct.Struct("=QddQQ")  # what, since, limit, steps, what again
_BYTES = 64


class Doing(enum.IntEnum):
    """A rank's activity."""

    ANYTHING = 0
    """Nothing that has a limit."""

    COMPUTING = 1
    """A step, or the input of one."""

    WAITING = 2
    """Waiting for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A rank's activity, and its duration so far."""

    doing: Doing
    for_s: float
    limit_s: float
    """Longest time that a step may take before the rank counts as hanging."""

    steps: int = 0
    """The number of the job's step that it was in last, from 1; 0 if it says none."""

    @property
    def hangs(self) -> bool:
        """Whether it computes for longer than a step may take."""
        return self.doing is Doing.COMPUTING and self.for_s > self.limit_s

    @property
    def waits_long(self) -> bool:
        """Whether it waits for others for at least half of that time."""
        return self.doing is Doing.WAITING and 2 * self.for_s > self.limit_s


def create(path: Path) -> None:
    """Create a page, which only this user may open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.truncate(_BYTES)


def _mapped(path: str | Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


@final
class ProgressWriter:
    """A rank's side."""

    def __init__(self, path: str | Path) -> None:
        """Open the page.

        Raises:
            OSError: it can't be opened.
        """
        self._map = _mapped(path)
        self.limit_s = 0.0
        """Set before the rank computes."""

        self.steps = 0
        """The number of the job's step, from 1."""

    def note(self, doing: Doing) -> None:
        """Note that the rank begins to do something."""
        now_s = time.monotonic()
        _ROW.pack_into(self._map, 0, doing, now_s, self.limit_s, self.steps, doing)


@final
class ProgressReader:
    """The keeper's side."""

    def __init__(self, path: str | Path) -> None:
        """Open the page.

        Raises:
            OSError: it can't be opened.
        """
        self._map = _mapped(path)

    def read(self) -> Progress:
        """Return what the rank does; a torn page is read again."""
        for _ in range(100):
            what, since_s, limit_s, steps, again = _ROW.unpack_from(self._map)
            if what == again:
                break
        return Progress(
            doing=Doing(what),
            for_s=time.monotonic() - since_s,
            limit_s=limit_s,
            steps=steps,
        )

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()
