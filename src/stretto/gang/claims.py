"""Share the micro-batches of one step among ranks, by a counter in a store.

# Note [A claim counts once]
A rank claims the next micro-batch when it has its device. If it does not finish in
time, another rank claims the micro-batch again. The first result that is entered
counts; the other is dropped by the rank that made it, before any sum. So the sum over
ranks has each micro-batch exactly once, whichever rank was slow.
"""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class Claims:
    """One step's claims, as one rank sees them."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        count: int,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        """Open the claims of a step; nothing is sent.

        Args:
            store: of ``torch.distributed``, with keys for this step only.
            rank: this process.
            count: how many micro-batches the step has.
            now: a clock in seconds.
        """
        self._store, self._rank, self._count, self._now = store, rank, count, now
        self._all_claimed_s: float | None = None
        self._rounds: dict[int, int] = {}

    def claim(self) -> int | None:
        """Claim the next micro-batch; ``None`` if all have been claimed."""
        if self._all_claimed_s is not None:
            return None
        number = int(self._store.add("next", 1)) - 1
        if number < self._count:
            return number
        self._all_claimed_s = self._now()
        return None

    @property
    def all_claimed(self) -> bool:
        """Whether this rank has seen that no unclaimed micro-batch is left."""
        return self._all_claimed_s is not None

    @property
    def finished(self) -> int:
        """How many micro-batches have a result that counts."""
        return int(self._store.add("finished", 0))

    @property
    def is_complete(self) -> bool:
        """Whether all have."""
        return self.finished >= self._count

    def finish(self, index: int) -> bool:
        """Enter a result; return whether it counts, because it is the first."""
        mine = str(self._rank)
        held = self._store.compare_set(f"by/{index}", "", mine)
        if held.decode() != mine:
            return False
        self._store.add("finished", 1)
        return True

    def claim_overdue(self, limit_s: float) -> int | None:
        """Claim a micro-batch that another rank should have finished long ago.

        Args:
            limit_s: how long after the last claim a micro-batch is overdue. After each
                time that it is claimed again, this time must pass once more.
        """
        if self._all_claimed_s is None:
            return None
        waited_s = self._now() - self._all_claimed_s
        for index in range(self._count):
            number = self._rounds.get(index, 0) + 1
            if waited_s < number * limit_s or self._store.check([f"by/{index}"]):
                continue
            self._rounds[index] = number
            if int(self._store.add(f"again/{index}/{number}", 1)) == 1:
                return index
        return None

    def remove(self) -> None:
        """Delete the step's keys; one rank does so, after all have left the step."""
        keys = ["next", "finished", *(f"by/{i}" for i in range(self._count))]
        for key in keys:
            with contextlib.suppress(RuntimeError):  # some stores delete nothing
                self._store.delete_key(key)
