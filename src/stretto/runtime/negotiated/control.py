"""Rounds over the control group: small collectives on the CPU, beside everything."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT_OVER = "Operation timed out!"


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

    def agree(self, vector: bytes) -> bytes:
        """The bitwise and of all ranks' vectors."""
        if self._size == 1:
            return vector
        words = torch.frombuffer(bytearray(vector), dtype=torch.int64)
        self._finish(self._lane.allreduce([words], self._and))
        return bytes(words.numpy().tobytes())

    def exchange(self, mine: bytes, room_bytes: int) -> list[bytes]:
        """What every rank brought, by rank; none more than ``room_bytes``."""
        if self._size == 1:
            return [mine]
        padded = torch.frombuffer(
            bytearray(mine.ljust(room_bytes, b" ")), dtype=torch.uint8
        )
        found = torch.empty(self._size * room_bytes, dtype=torch.uint8)
        self._finish(self._lane._allgather_base(found, padded))  # noqa: SLF001
        everything = bytes(found.numpy().tobytes())
        return [
            everything[i * room_bytes : (i + 1) * room_bytes].strip()
            for i in range(self._size)
        ]

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
