"""Pace rounds, name the ranks that a request waits for, share why the engine ended.

The control thread uses all three.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.runtime.ranks import Ranks

_MAX_WAIT_S = 0.02
_SHARE = 0.25


@final
class Pace:
    """Spaces out rounds that make no progress.

    # Note [Rounds that bring nothing]
    A rank that waits for a peer mostly sleeps in the all-reduce of a round that the
    peer has not entered. But if ranks wait for different requests, each enters, the
    round ends at once without a ready request, and the next round would be no better.
    So after a round without a launch, the next round waits for a quarter of the time
    since the last round with progress, at most 20 ms and at least ``cycle_s``. New work
    on a rank begins its next round after ``cycle_s``; the others enter within their
    pause. A wait of 1 s then takes about 60 rounds of 0.1 to 0.2 ms, about 1 % of a
    core; and a request that becomes ready after a wait of w is seen at most w / 4 and
    20 ms late. The first round after an idle time begins at once.
    """

    def __init__(self, cycle_s: float) -> None:
        self._cycle_s = cycle_s
        self._began_s = float("-inf")
        self._progress_s = float("-inf")
        self._barren = False

    def begin(self, now_s: float) -> None:
        """Record that a round begins."""
        self._began_s = now_s

    def end(self, now_s: float, *, launched: bool) -> None:
        """Record that a round ended, with or without a launch."""
        if launched or not self._barren:
            self._progress_s = now_s
        self._barren = not launched

    def due_s(self, *, news: bool) -> float:
        """Return the earliest time for the next round; ``news``: there is new work."""
        due_s = self._began_s + self._cycle_s
        if news or not self._barren:
            return due_s
        waited_s = self._began_s - self._progress_s
        return max(due_s, self._began_s + min(_MAX_WAIT_S, _SHARE * waited_s))


_MAX_NAMES = 1000
_STORE_S = 2.0


@final
class StallDetector:
    """Names the ranks that have not submitted what this rank waits for.

    A rank in a round can't see which ranks are missing from it. So a rank that has
    waited for one tick writes its requests into the store, and a rank that is about to
    warn reads what the others wrote: a rank that did not write a request has not
    submitted it. None of this runs before a rank has waited that long.

    A rank that is stopped may have sent its last bits to some ranks and not to others.
    So what is launched on one rank may still be pending on another, and ranks write
    both.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._store = PrefixStore("stall", ranks.store)
        self._published: tuple[list[str], list[str]] = ([], [])
        self._missing: dict[str, list[int]] = {}

    @property
    def published(self) -> bool:
        """Whether other ranks can read that this rank waits for a request."""
        return self._published != ([], [])

    def publish(self, waiting: Sequence[str], launched: Sequence[str]) -> None:
        """Publish what this rank waits for; empty lists clear it.

        Args:
            waiting: What other ranks may not have submitted.
            launched: What all ranks have submitted, and what has not ended here.
        """
        mine = (list(waiting[:_MAX_NAMES]), list(launched[:_MAX_NAMES]))
        self._missing = {p: r for p, r in self._missing.items() if p in mine[0]}
        if mine != self._published:
            self._store.set(str(self._ranks.rank), json.dumps(mine))
            self._published = mine

    def missing(self, place: str) -> list[int]:
        """Return the ranks that have not submitted ``place``, as this one has."""
        found = []
        for rank in range(self._ranks.size):
            waiting, launched = self._of(rank)
            if rank != self._ranks.rank and place not in {*waiting, *launched}:
                found.append(rank)
        self._missing[place] = found
        return found

    def last_missing(self, place: str) -> list[int]:
        """Return the last result of `missing`, without a request to the store."""
        return self._missing.get(place, [])

    def instead(self, ranks: Sequence[int]) -> str:
        """Return what ``ranks`` wait for and this one has not submitted, as a clause.

        If each waits for the other, they probably use different names for one request.
        """
        for rank in ranks:
            mine = {*self._published[0], *self._published[1]}
            others = [p for p in self._of(rank)[0] if p not in mine]
            if others:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                return (
                    f"; {self._ranks.name(rank)} waits for {others[0]}{more}, which "
                    f"{self._ranks.name(self._ranks.rank)} did not submit: check "
                    "whether they use different names"
                )
        return ""

    def _of(self, rank: int) -> tuple[list[str], list[str]]:
        """Return what a rank waits for, and what is launched and has not ended."""
        if not self._store.check([str(rank)]):
            return [], []
        waiting, launched = json.loads(self._store.get(str(rank)))
        return waiting, launched


@final
class AbortReason:
    """The reason why a rank ended the engine, kept in the store for the other ranks.

    The store may be lost with its host, and then does not answer for minutes, so it is
    queried in a thread that may be abandoned.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._alone = ranks.size == 1
        self._store = PrefixStore("why", ranks.store)

    def leave(self, text: str) -> str:
        """Store a note and return it, or return the first note if there is one."""
        return self._ask(lambda: self._first(text)) or text

    def found(self) -> str | None:
        """Return the note that a rank left, or None."""
        return self._ask(self._read)

    def _first(self, text: str) -> str:
        return bytes(self._store.compare_set("note", "", text)).decode()

    def _read(self) -> str | None:
        if not self._store.check(["note"]):
            return None
        return bytes(self._store.get("note")).decode()

    def _ask(self, ask: Callable[[], str | None]) -> str | None:
        if self._alone:
            return None
        texts: list[str | None] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                texts.append(ask())

        thread = threading.Thread(target=run, name="stretto-store", daemon=True)
        thread.start()
        thread.join(_STORE_S)
        return texts[0] if texts else None
