"""One process's place in a process group, and the rows of its model's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.distributed_c10d import Store

from stretto.runtime.presence import Presence

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorRow(NamedTuple):
    """One parameter that requires a gradient."""

    name: str

    bytes: int

    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One process's place in a process group, and the group's store."""

    rank: int
    """Rank in the group."""

    size: int

    names: tuple[int, ...]
    """Global rank of each rank of the group, used in messages."""

    store: Store

    timeout_s: float

    presence: Presence | None = None
    """Tracks the ranks' processes; ``None`` if unknown."""

    is_over: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether these ranks have stopped training together, so that no wait ends."""

    def name(self, rank: int) -> str:
        """Return ``rank 3``, with the global number."""
        return f"rank {self.names[rank]}"

    def name_all(self, ranks: Sequence[int]) -> str:
        """Return ``rank 1`` or ``ranks 0, 2``, with the global numbers."""
        numbers = ", ".join(str(self.names[r]) for r in ranks)
        return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def timeout_of(seconds: float) -> timedelta:
    """Return a timeout in the type of torch.distributed."""
    return timedelta(seconds=seconds)
