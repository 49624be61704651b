"""Sets of ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ProcessSet:
    """Ranks that run collectives among themselves.

    It is created from global rank numbers, then passed to `init` or `add_process_set`,
    which number it. Two sets are the same if their ranks are.

    Args:
        ranks_or_comm: Global ranks, in any order. MPI communicators are not supported.

    Raises:
        ValueError: it is not a sequence of distinct whole numbers >= 0.
    """

    process_set_id: int | None = None
    """The same on all ranks; ``None`` until the set is added, and after its removal."""

    ranks: list[int] | None = None
    """Global ranks, ascending."""

    mpi_comm: Any = None
    """Always ``None``: there is no MPI."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(  # noqa: TRY004
                "a ProcessSet is made from a list of global ranks, got "
                f"{type(ranks_or_comm).__name__}. MPI communicators are not supported: "
                "pass the ranks that they contain."
            )
        ranks = list(ranks_or_comm)
        wrong = [r for r in ranks if not isinstance(r, int) or r < 0]
        if wrong or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"a ProcessSet's ranks must be distinct whole numbers >= 0, got {ranks}"
            )
        self.ranks = sorted(ranks)
        self._rank: int | None = None

    def size(self) -> int | None:
        """Return the number of ranks, or ``None`` until the set is added."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank within the set.

        ``None`` until the set is added, and if this process is not in it.
        """
        return None if self.process_set_id is None else self._rank

    def included(self) -> bool | None:
        """Return whether this process is in it, or ``None`` until the set is added."""
        return None if self.process_set_id is None else self._rank is not None

    def added(self, process_set_id: int, ranks: Iterable[int], own: int) -> None:
        """Record the set's number, equal on all ranks; ``own`` is this global rank."""
        self.process_set_id = process_set_id
        self.ranks = list(ranks)
        self._rank = self.ranks.index(own) if own in self.ranks else None

    def left(self) -> None:
        """Reset to a set that is not added: it may be passed to `init` again."""
        self.process_set_id = None
        self._rank = None

    def invalidate(self) -> None:
        """Mark the set as removed: it no longer has ranks."""
        self.left()
        self.ranks = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0
