"""A file in which a job's ranks count their steps, and from which others read them.

The process that starts the ranks creates the file and names it in
`variable_names.STEP_COUNTS`. Each rank has a slot, with the number of steps it has
ended and when the first and the last ended. It maps the file, so a count costs no
system call, and the reader needs nothing from the job.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path


_MAGIC = int.from_bytes(b"strsteps", "big")
_HEADER = struct.Struct("=QQ")  # magic, ranks
_SLOT = struct.Struct("=QddQ")  # steps, first, last, steps again
_SLOT_BYTES = 64
_MAX_RANKS = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class StepCount:
    """The steps of one rank."""

    steps: int
    """Steps that have ended."""

    first_s: float
    """When the first ended, on the clock of ``time.monotonic``."""

    last_s: float
    """When the last ended."""


def create(path: Path, ranks: int) -> None:
    """Create a file with a slot for each rank, which only this user may open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, ranks))
        file.truncate(_SLOT_BYTES * (ranks + 1))


def _mapped(path: str | Path) -> tuple[mmap.mmap, int]:
    """Return the mapped file and its number of ranks.

    Raises:
        SpecError: it is not such a file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size < _SLOT_BYTES:
            raise SpecError(f"{path}: not a file of step counts")
        found = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    magic, ranks = _HEADER.unpack_from(found, 0)
    if magic != _MAGIC or not 0 < ranks <= _MAX_RANKS:
        found.close()
        raise SpecError(f"{path}: not a file of step counts")
    if size < _SLOT_BYTES * (ranks + 1):
        found.close()
        raise SpecError(f"{path}: shorter than its {ranks} ranks need")
    return found, ranks


@final
class StepCounter:
    """A rank's side."""

    def __init__(self, path: str | Path, rank: int) -> None:
        """Open the rank's slot.

        Raises:
            SpecError: the file is not one of step counts, or has no such rank.
            OSError: it cannot be opened.
        """
        self._map, ranks = _mapped(path)
        if not 0 <= rank < ranks:
            self._map.close()
            raise SpecError(f"{path}: has {ranks} ranks, not rank {rank}")
        self._at = _SLOT_BYTES * (rank + 1)
        self._steps, self._first_s = 0, 0.0

    def add(self) -> None:
        """Count a step that has ended."""
        self.set(self._steps + 1)

    def set(self, steps: int) -> None:
        """Note how many steps have ended; the last of them ends now."""
        now_s = time.monotonic()
        if not self._steps:
            self._first_s = now_s
        self._steps = steps
        _SLOT.pack_into(
            self._map, self._at, self._steps, self._first_s, now_s, self._steps
        )


@final
class StepCounts:
    """The reader's side."""

    def __init__(self, path: str | Path) -> None:
        """Open the file.

        Raises:
            SpecError: it is not a file of step counts.
            OSError: it cannot be opened.
        """
        self._map, self.ranks = _mapped(path)

    def read(self, rank: int) -> StepCount:
        """Return a rank's count; a torn one is read again."""
        for _ in range(100):
            steps, first_s, last_s, again = _SLOT.unpack_from(
                self._map, _SLOT_BYTES * (rank + 1)
            )
            if steps == again:
                break
        return StepCount(steps, first_s, last_s)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
