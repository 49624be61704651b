"""Which attempt to meet ranks make together.

# Note [Attempts]
A rank whose attempt to meet the others has failed may try again, while a late one tries
for the first time. If each counted its own attempts, they would never meet again. So
the first rank numbers attempts, and the others take part in its newest one that they
have not been in. It decides alone whether an attempt is complete, so a rank whose time
runs out takes no other with it: the next attempt is the same for all. What a rank has
been in is kept in the store, which may outlive its process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import CommTimeout
from stretto.runtime.presence import Wait
from stretto.runtime.store import loss_message, missing_after

if TYPE_CHECKING:
    from stretto.runtime.ranks import Ranks

_POLL_S = 0.0003
_MAX_POLL_S = 0.1

_NEWEST = "newest"


def begin_attempt(ranks: Ranks, store: Store, purpose: str) -> int:
    """Return the number of the attempt that all ranks make now, once all are here.

    Args:
        ranks: The participating ranks.
        store: Where they meet; used for nothing else.
        purpose: For messages.

    Raises:
        CommTimeout: a rank did not arrive in time, or has ended.
        RuntimeError: the store does not answer.
    """
    if ranks.size == 1:
        return store.add(_NEWEST, 1)
    if ranks.rank:
        return _take_part(ranks, store, purpose)
    number = store.add(_NEWEST, 1)
    keys = [f"{number}/{rank}" for rank in range(ranks.size)]
    store.set(keys[0], "")
    missing = missing_after(ranks, store, keys, ranks.is_over)
    store.set(f"{number}/end", "go" if missing is None else "stop")
    if missing is not None:
        raise CommTimeout(f"{ranks.name(0)} can't {purpose}: {missing.reason(ranks)}")
    for rank in range(ranks.size):  # no rank is in that attempt anymore
        store.delete_key(f"{number - 1}/{rank}")
    store.delete_key(f"{number - 1}/end")
    return number


def _take_part(ranks: Ranks, store: Store, purpose: str) -> int:
    """Return the first rank's attempt, once it has said that all ranks are in it."""
    mine = PrefixStore(f"of {ranks.rank}", store)
    before = mine.add("last", 0)
    watch = Wait(ranks.presence)
    began_s, pause_s = time.perf_counter(), _POLL_S
    number = before
    while True:
        lost = watch.lost(ranks.names[:1])
        newest = store.add(_NEWEST, 0)
        if newest > number:
            number = newest
            store.set(f"{number}/{ranks.rank}", "")
        if number > before and store.check([f"{number}/end"]):
            mine.add("last", number - mine.add("last", 0))
            if store.get(f"{number}/end") == b"go":
                return number
            before = number
        elif lost:
            why = loss_message(ranks, [0], lost)
            raise CommTimeout(f"{ranks.name(ranks.rank)} can't {purpose}: {why}")
        waited_s = time.perf_counter() - began_s
        if waited_s > ranks.timeout_s or ranks.is_over():
            what = "wait for other ranks" if number > before else f"{purpose}, too"
            raise CommTimeout(
                f"{ranks.name(ranks.rank)} can't {purpose}: {ranks.name(0)} did not "
                f"{what} within {waited_s:.3g} s. Check the log of {ranks.name(0)}."
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)
