"""All ranks compare what they came with before anything depends on it."""

from __future__ import annotations

import json
import logging
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import CommTimeout, RankDisagreement, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_POLL_S = 0.0003  # ranks mostly come to a meeting together
_POLL_MOST_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One process's place in a process group, and the group's store."""

    rank: int
    """In the group."""

    size: int

    names: tuple[int, ...]
    """Global rank of each rank of the group: what messages call it."""

    store: Store

    timeout_s: float

    def name(self, rank: int) -> str:
        """``rank 3``, by its global number."""
        return f"rank {self.names[rank]}"

    def name_all(self, ranks: Sequence[int]) -> str:
        """``rank 1`` or ``ranks 0, 2``, by their global numbers."""
        numbers = ", ".join(str(self.names[r]) for r in ranks)
        return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def ranks_of(group: dist.ProcessGroup, *, timeout_s: float | None) -> Ranks:
    """This process's place in a group.

    ``timeout_s=None`` takes the group's own time-out.
    """
    if timeout_s is None:
        timeout_s = _group_timeout_s(group)
    return Ranks(
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        names=tuple(dist.get_process_group_ranks(group)),
        store=PrefixStore("stretto", _store_of(group)),
        timeout_s=timeout_s,
    )


# Note [One connection per thread that may block]
# A client of a TCPStore sends one request at a time: while a thread waits in it for a
# key (as Gloo does when it connects), every other request of this process over the same
# client waits too, and two ranks whose threads wait for each other's next request hang.
# So stretto never waits on the process group's own client. All requests for a group
# share one connection, on which nothing blocks (`missing_after` polls), and whatever
# opens lanes clones a connection of its own from that one.

_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Store] = (
    weakref.WeakKeyDictionary()
)


def _store_of(group: dist.ProcessGroup) -> Store:
    """Return stretto's connection to a group's store."""
    found = _connections.get(group)
    if found is None:
        if hasattr(group, "get_group_store"):
            theirs = group.get_group_store()
        else:
            theirs = dist.distributed_c10d._world.pg_map[group][1]  # noqa: SLF001
        # MPI has no store; whatever needs one is for Gloo and NCCL.
        found = dist.HashStore() if theirs is None else own_connection(theirs)
        _connections[group] = found
    return found


def own_connection(store: Store) -> Store:
    """Return the same store over a connection of its own.

    Use it wherever a thread may block in the store. A store that cannot be cloned, or
    that does not answer, is returned as it is: the next request reports the failure.
    """
    cloned: Any = store
    try:
        # A clone connects again, and retries for more than twice the store's time-out
        # if nobody listens; a request on the open connection fails at once.
        store.check(["stretto"])
        return cast("Store", cloned.clone())
    except (AttributeError, RuntimeError) as exc:
        _log.debug("the store is not cloned: %s", str(exc).splitlines()[0])
        return store


def missing_after(
    store: Store,
    keys: Sequence[str],
    timeout_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Return the positions of the keys that are missing when the time is up.

    ``is_over`` is asked meanwhile; the time is up when it says so.
    """
    deadline = time.perf_counter() + timeout_s
    pause_s = _POLL_S
    missing = list(range(len(keys)))
    while True:
        missing = [i for i in missing if not store.check([keys[i]])]
        if not missing or time.perf_counter() > deadline or is_over():
            return missing
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _POLL_MOST_S)


def _group_timeout_s(group: dist.ProcessGroup) -> float:
    backend: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    for device in group._device_types:  # noqa: SLF001
        backend = group._get_backend(device)  # noqa: SLF001
        options = getattr(backend, "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())  # noqa: SLF001
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


@final
class Agreement:
    """Meetings of all ranks of a group in its store, numbered by their order.

    Every rank must call `require_same` the same number of times in the same order;
    what each call is about is part of what is compared, so ranks that come to the
    same meeting with different intents are told so.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._meeting = 0
        self.is_over: Callable[[], bool] = lambda: False
        """Whether a meeting is to end without those who have not come."""

    @cached_property
    def serial(self) -> int:
        """Which of the group's models this is: equal on all ranks.

        Taken when it is first asked for, which all ranks do in one order. A model that
        one rank copies for itself alone never asks, so it shifts nobody's numbers.
        """
        # A counter inside the store rather than in this process: it begins anew
        # with the store, so it is the same on all ranks also after a restart.
        return self._ranks.store.add(f"serial/{self._ranks.rank}", 1)

    @cached_property
    def _store(self) -> Store:
        return PrefixStore(f"agree/{self.serial}", self._ranks.store)

    def require_same(self, purpose: str, values: Mapping[str, str]) -> None:
        """Requires that all ranks pass equal values.

        A value under ``trouble`` is not compared: where any rank has one, every
        other rank is told. Either every rank returns or every rank that lives raises:
        never do some go on while others stop.

        Raises:
            RankDisagreement: on every rank, naming the values and their ranks.
            CommTimeout: some ranks did not come in time, or the store is gone; the
                message names them.
        """
        rows = self._rows(purpose, values)
        # What ranks want to do comes first: other values then differ by nature.
        keys = sorted({k for row in rows for k in row}, key=_order)
        for key in keys:
            if key == "trouble":
                # Options follow: one that can't be used differs by nature.
                self._refuse_trouble(rows)
                continue
            self._refuse_different(key, rows)

    def gather(self, purpose: str, text: str) -> list[str]:
        """Return what every rank passes, by rank. A meeting, as `require_same`.

        Raises:
            RankDisagreement: on every rank, ranks came for different purposes.
            CommTimeout: some ranks did not come in time, or the store is gone.
        """
        rows = self._rows(purpose, {"text": text})
        self._refuse_different("purpose", rows)
        return [row["text"] for row in rows]

    def _rows(self, purpose: str, values: Mapping[str, str]) -> list[dict[str, str]]:
        mine = json.dumps({"purpose": purpose, **values})
        return [json.loads(value) for value in self._exchange(purpose, mine)]

    def _refuse_different(self, key: str, rows: Sequence[Mapping[str, str]]) -> None:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks_by_value.setdefault(row.get(key, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            raise RankDisagreement(self._difference(key, ranks_by_value))

    def _refuse_trouble(self, rows: Sequence[Mapping[str, str]]) -> None:
        for rank, row in enumerate(rows):
            if "trouble" in row and rank != self._ranks.rank:
                raise RankDisagreement(
                    f"{self._ranks.name(rank)} can't go on: {row['trouble']}"
                )

    def _difference(self, key: str, ranks_by_value: dict[str, list[int]]) -> str:
        parts = [
            f"{self._ranks.name_all(ranks)} came with {value}"
            for value, ranks in ranks_by_value.items()
        ]
        remedy = _REMEDY.get(key, _REMEDY["settings"])
        return f"{_KEY_WORDS.get(key, key)}: {'; '.join(parts)}. {remedy}"

    def _exchange(self, purpose: str, mine: str) -> list[str]:
        """What every rank brought, by rank."""
        ranks = self._ranks
        try:
            return self._exchange_in_store(purpose, mine)
        except RuntimeError as exc:
            if isinstance(exc, StrettoError):
                raise
            raise CommTimeout(
                f"{ranks.name(ranks.rank)} can't {purpose}: the store, which "
                f"{ranks.name(0)} or the launcher holds, does not answer: "
                f"{ranks.name(0)} is gone, or the network is. Look at the log of "
                f"{ranks.name(0)} first. Cause: {str(exc).splitlines()[0]}"
            ) from exc

    # Note [One decision per meeting]
    # A rank whose time is up while the last one comes would stop where others go on.
    # So whoever has seen all the others, or has given up, tries to write the meeting's
    # decision; the store keeps the first, and every rank does what is written there.

    def _exchange_in_store(self, purpose: str, mine: str) -> list[str]:
        ranks, store = self._ranks, self._store
        meeting, self._meeting = self._meeting, self._meeting + 1
        keys = [f"{meeting}/{rank}" for rank in range(ranks.size)]
        store.set(keys[ranks.rank], mine)
        missing = missing_after(store, keys, ranks.timeout_s, self.is_over)
        decision = store.compare_set(f"{meeting}/end", "", "stop" if missing else "go")
        if decision != b"go":
            what = (
                f"waited {ranks.timeout_s:g} s for {ranks.name_all(missing)} to "
                if missing
                else "came after others had stopped waiting for it to "
            )
            who = "what did not come" if missing else ranks.name(ranks.rank)
            raise CommTimeout(
                f"{ranks.name(ranks.rank)} {what}{purpose}. Look at the log of "
                f"{who}: it ended, hangs, or does something else."
            )
        found = [value.decode() for value in _values(store, keys)]
        if meeting > 0:
            # All came to this meeting, so all have read what the last one left.
            store.delete_key(f"{meeting - 1}/{ranks.rank}")
            if ranks.rank == 0:
                store.delete_key(f"{meeting - 1}/end")
        return found


def _values(store: Any, keys: list[str]) -> list[bytes]:
    """What stands at the keys, by one request where the store can."""
    if store.has_extended_api():
        values: list[bytes] = store.multi_get(keys)
        return values
    return [store.get(key) for key in keys]


_KEY_WORDS = {
    "purpose": "ranks do different things",
    "stretto": "ranks run different versions of stretto",
    "torch": "ranks run different versions of PyTorch",
    "model": "ranks hold different models",
    "plan": "ranks hold different plans",
    "settings": "ranks are set differently",
}
_KEY_ORDER = {key: i for i, key in enumerate((*_KEY_WORDS, "trouble"))}


def _order(key: str) -> tuple[int, str]:
    """What is compared first; options come after all else."""
    return _KEY_ORDER.get(key, len(_KEY_ORDER)), key


_REMEDY = {
    "purpose": "Let every rank build its models and apply its plans in one order.",
    "stretto": "Install one version everywhere.",
    "torch": "Install one version everywhere.",
    "model": "Build the model with the same code and options on every rank.",
    "plan": "Give every rank the same plan file.",
    "settings": "Give every rank the same arguments and environment.",
}


def timeout_of(seconds: float) -> timedelta:
    """A time-out as torch.distributed takes it."""
    return timedelta(seconds=seconds)
