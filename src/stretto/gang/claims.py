"""Share the micro-batches of one step among ranks, by a counter in a store.

# Note [A claim counts once]
A rank claims the next micro-batch when it has its device. If it does not finish in
time, another rank claims the micro-batch again. The first result that is entered
counts; the other is dropped by the rank that made it, before any sum. So the sum over
ranks has each micro-batch exactly once, whichever rank was slow.

The results of a rank that is lost are lost with it. A micro-batch whose result it has
entered, or which it was computing, is claimed again by the others, and only they may
replace its entry. A rank that was given up but continues replaces no entry; what it
enters itself is replaced.
"""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


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
        self.lost: set[int] = set()
        """Ranks whose claims have been returned."""

        self._returned: list[int] = []
        self._once_returned: set[tuple[int, int]] = set()
        self._assigned: Mapping[int, int] | None = None
        self._first_missing = 0

    def assign(self, ranks: Mapping[int, int]) -> None:
        """Give each micro-batch to one rank, instead of the counter."""
        self._assigned = ranks
        self._all_claimed_s = self._now()

    def claim(self) -> int | None:
        """Claim the next micro-batch; ``None`` if all have been claimed."""
        if self._all_claimed_s is None:
            number = int(self._store.add("next", 1)) - 1
            if number < self._count:
                return self._claimed(number)
            self._all_claimed_s = self._now()
        while self._returned:
            index = self._returned.pop(0)
            taken = f"returned/{index}/{len(self.lost)}"
            if not self._counts(index) and int(self._store.add(taken, 1)) == 1:
                return self._claimed(index)
        return None

    def _claimed(self, index: int) -> int:
        """Note whose claim it is now, in case that this rank is lost."""
        self._store.set(f"for/{index}", str(self._rank))
        return index

    @property
    def all_claimed(self) -> bool:
        """Whether this rank knows of no unclaimed micro-batch."""
        return self._all_claimed_s is not None and not self._returned

    @property
    def finished(self) -> int:
        """How many results have been entered, including those of lost ranks."""
        return int(self._store.add("finished", 0))

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch has a result that counts."""
        missing = [f"by/{i}" for i in range(self._first_missing, self._count)]
        if missing and not self._store.check(missing):
            while self._store.check([f"by/{self._first_missing}"]):
                self._first_missing += 1
            return False
        self._first_missing = self._count
        if not self.lost:
            return True
        lost = [i for i in range(self._count) if not self._counts(i)]
        for index in lost:
            self._return(index)
        return not lost

    def finish(self, index: int) -> bool:
        """Enter a result; return whether it counts, because it is the first."""
        mine, expected = str(self._rank), ""
        while True:
            held = self._store.compare_set(f"by/{index}", expected, mine).decode()
            if held == mine:
                break
            if int(held) not in self.lost:
                return False
            expected = held
        self._store.add("finished", 1)
        return True

    def leave(self) -> None:
        """Note that this rank stops claiming, though micro-batches are missing."""
        self._store.set(f"left/{self._rank}", "1")

    def all_left(self, ranks: Collection[int]) -> bool:
        """Return whether all these ranks have left, and the step is incomplete."""
        return (
            bool(self._store.check([f"left/{rank}" for rank in ranks]))
            and not self.is_complete
        )

    def claim_overdue(self, limit_s: float) -> int | None:
        """Claim a micro-batch that another rank should have finished long ago.

        Args:
            limit_s: how long after the last claim a micro-batch is overdue. After each
                time that it is claimed again, this time must pass once more.
        """
        if self._all_claimed_s is None or (self._assigned and not self.lost):
            return None
        waited_s = self._now() - self._all_claimed_s
        for index in range(self._count):
            number = self._rounds.get(index, 0) + 1
            if waited_s < number * limit_s or self._counts(index):
                continue
            self._rounds[index] = number
            if int(self._store.add(f"again/{index}/{number}", 1)) == 1:
                return self._claimed(index)
        return None

    def lose(self, ranks: Collection[int]) -> None:
        """Return what lost ranks have claimed to those that may be claimed.

        All ranks that remain must name the same ranks in the same calls.
        """
        self.lost.update(ranks)
        for index in range(self._count):
            if self._store.check([f"by/{index}"]):
                is_lost = not self._counts(index)
            else:
                is_lost = self._holder(index) in self.lost
            if is_lost:
                self._return(index)

    def _return(self, index: int) -> None:
        """Let a micro-batch be claimed again, once after each loss."""
        after = (index, len(self.lost))
        if after not in self._once_returned:
            self._once_returned.add(after)
            self._returned.append(index)

    def _holder(self, index: int) -> int | None:
        """Return the rank that claimed an unfinished micro-batch, if it is known."""
        if self._store.check([f"for/{index}"]):
            return int(self._store.get(f"for/{index}"))
        return None if self._assigned is None else self._assigned.get(index)

    def _counts(self, index: int) -> bool:
        """Return whether a micro-batch has a result that is not lost."""
        if not self._store.check([f"by/{index}"]):
            return False
        return not self.lost or int(self._store.get(f"by/{index}")) not in self.lost

    def remove(self) -> None:
        """Delete the step's keys; one rank does so, after all have left the step."""
        keys = ["next", "finished"]
        keys += [f"{kind}/{i}" for kind in ("by", "for") for i in range(self._count)]
        for key in keys:
            with contextlib.suppress(RuntimeError):  # some stores delete nothing
                self._store.delete_key(key)
