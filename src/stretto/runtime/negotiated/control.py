"""Rounds over the control group: small collectives on the CPU, beside everything."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import numpy
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT_OVER = "Operation timed out!"

# Note [Small collectives go directly]
# Gloo's all-reduce is a ring: 2 (p - 1) messages that wait for each other, as many
# threads woken one after the other. What is small goes from each rank to every other
# at once, and each combines what it got, in the order of ranks: one message's time, and
# the same bits everywhere. Measured, 4 ranks on two idle cores, 128 bytes and 4 KiB:
# 1.1 ms against 3.3 ms.
_DIRECT_BYTES = 64 * 2**10


def is_direct(size_bytes: int, size: int) -> bool:
    """Whether so many bytes of each rank are small: see Note."""
    return size_bytes * (size - 1) <= _DIRECT_BYTES


@final
class Control:
    """The control group's two collectives.

    ``tick`` is called about every ``tick_s`` while this rank waits for others.
    """

    def __init__(
        self, lane: Any, *, size: int, tick_s: float, tick: Callable[[], None]
    ) -> None:
        self._lane = lane
        self._size = size
        self._tick = timedelta(seconds=tick_s)
        self._on_tick = tick
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.BAND
        self._and = options
        self._all: Any = dist.AllToAllOptions()

    def agree(self, vector: bytes, riding: bytes = b"") -> tuple[bytes, Any]:
        """The bitwise and of all ranks' vectors, and each rank's ``riding`` as a row.

        ``riding`` is equally long on all ranks; nothing rides where there is no room.
        """
        if self._size == 1:
            return vector, None
        if is_direct(len(vector) + len(riding), self._size):
            rows = self._gather(vector + riding).numpy().reshape(self._size, -1)
            vectors = rows[:, : len(vector)].copy().view(numpy.int64)
            agreed = numpy.bitwise_and.reduce(vectors, axis=0)
            return bytes(agreed.tobytes()), rows[:, len(vector) :]
        words = torch.frombuffer(bytearray(vector), dtype=torch.int64)
        self._finish(self._lane.allreduce([words], self._and))
        return bytes(words.numpy().tobytes()), None

    def exchange(self, mine: bytes, room_bytes: int) -> list[bytes]:
        """What every rank brought, by rank; none more than ``room_bytes``."""
        if self._size == 1:
            return [mine]
        everything = bytes(self._gather(mine.ljust(room_bytes, b" ")).numpy().tobytes())
        return [
            everything[i * room_bytes : (i + 1) * room_bytes].strip()
            for i in range(self._size)
        ]

    def _gather(self, mine: bytes) -> torch.Tensor:
        """All ranks' bytes, equally many of each."""
        room_bytes = self._size * len(mine)
        found = torch.empty(room_bytes, dtype=torch.uint8, device="cpu")
        if is_direct(len(mine), self._size):
            sent = torch.frombuffer(bytearray(mine * self._size), dtype=torch.uint8)
            work = self._lane.alltoall_base(found, sent, [], [], self._all)
        else:
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            work = self._lane._allgather_base(found, sent)  # noqa: SLF001
        self._finish(work)
        return found

    def close(self) -> None:
        """Lets go of the group."""
        self._lane = None

    def _finish(self, work: Any) -> None:
        while True:
            try:
                # Sleeps in C++; the work goes on when this wait is over.
                work.wait(self._tick)
            except RuntimeError as exc:
                if _WAIT_OVER not in str(exc):
                    raise
                self._on_tick()
            else:
                return
