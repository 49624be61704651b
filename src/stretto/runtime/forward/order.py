"""Launch noted buckets in a planned order."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@final
class LaunchOrder:
    """Launches each bucket once it and all before it in the order are ready.

    The Reducer passes buckets in index order. Every rank launches in the planned order,
    because a lane's collectives must be in the same order everywhere.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._launched = 0
        self._noted: dict[int, Callable[[], object]] = {}

    def reset(self) -> None:
        """Start a step; drop what the last one, cut short, has noted."""
        self._launched = 0
        self._noted.clear()

    def note(self, index: int, launch: Callable[[], object]) -> None:
        """Note that a bucket is ready; launch all buckets whose turn it is."""
        self._noted[index] = launch
        while self._launched < len(self._order):
            turn = self._noted.pop(self._order[self._launched], None)
            if turn is None:
                return
            self._launched += 1
            turn()
