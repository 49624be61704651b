"""All ranks compare what they came with before anything depends on it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import CommTimeout, RankDisagreement, StrettoError
from stretto.runtime.presence import Presence, State, Wait, call_aside
from stretto.runtime.sockets import (
    Socket,
    bound_answers,
    connections_to,
    open_sockets,
    shut,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_POLL_S = 0.0003  # ranks mostly come to a meeting together
_POLL_MOST_S = 0.1

LEAST_ANSWER_S = 1.0
"""A store may take so long for an answer, however short a time-out is."""


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

    presence: Presence | None = None
    """Which processes the ranks are; ``None``: not known."""

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
    store = PrefixStore("stretto", _store_of(group))
    rank, names = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    presence = _presences.get(group)
    if presence is None and len(names) > 1:
        presence = _presences[group] = Presence(store, rank=names[rank])
        with contextlib.suppress(RuntimeError):  # the first meeting reports it
            presence.publish()
    return Ranks(
        rank=rank,
        size=len(names),
        names=names,
        store=store,
        timeout_s=timeout_s,
        presence=presence,
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


_presences: weakref.WeakKeyDictionary[dist.ProcessGroup, Presence] = (
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
        found = dist.HashStore() if theirs is None else _connect(theirs, group)
        _connections[group] = found
    return found


def _connect(theirs: Store, group: dist.ProcessGroup) -> Store:
    """Return a connection of stretto's to the store of a group.

    Raises:
        CommTimeout: the store does not answer.
    """
    limit_s = max(LEAST_ANSWER_S, _group_timeout_s(group))
    deadline = time.perf_counter() + limit_s
    # On the group's own connection a request has no time-out: the thread is left
    # behind in it where the store's process is stopped.
    ended, found = call_aside(
        partial(_clone, theirs, limit_s),
        name="stretto-connecting",
        look=lambda: time.perf_counter() > deadline,
    )
    if not ended:
        raise CommTimeout(
            f"rank {dist.get_rank()}: the store, which rank 0 or the launcher holds, "
            f"did not answer for {limit_s:g} s. Look at the log of rank 0 first."
        )
    return cast("Store", found)


def own_connection(ranks: Ranks, *, limit_s: float | None = None) -> Store:
    """Return the ranks' store over a connection of its own.

    Use it wherever a thread may block in the store. A store that cannot be cloned, or
    that does not answer, is returned as it is: the next request reports the failure.
    On the new connection a request fails whose answer takes longer than ``limit_s``
    (``None``: the ranks' time-out); it is of no use then, and its owner drops it.
    """
    limit_s = max(LEAST_ANSWER_S, ranks.timeout_s if limit_s is None else limit_s)
    watch = Wait(ranks.presence)
    deadline = time.perf_counter() + max(limit_s, ranks.timeout_s)

    def in_vain() -> bool:
        return bool(watch.lost(ranks.names[:1])) or time.perf_counter() > deadline

    # Where nobody listens any more, connecting is tried again for many minutes.
    ended, found = call_aside(
        partial(_clone, ranks.store, limit_s), name="stretto-connecting", look=in_vain
    )
    return cast("Store", found) if ended else ranks.store


def _clone(store: Store, limit_s: float) -> Store:
    cloned: Any = store
    try:
        # A clone connects again, and retries for more than twice the store's time-out
        # if nobody listens; a request on the open connection fails at once.
        store.check(["stretto"])
        before = open_sockets()
        found = cast("Store", cloned.clone())
    except (AttributeError, RuntimeError) as exc:
        _log.debug("the store is not cloned: %s", str(exc).splitlines()[0])
        return store
    mine = connections_to(open_sockets() - before, found)
    bound_answers(mine, limit_s)
    _sockets[found] = mine
    return found


_sockets: weakref.WeakKeyDictionary[Store, set[Socket]] = weakref.WeakKeyDictionary()


def end_requests(store: Store) -> None:
    """End what waits on a connection that `own_connection` made, and the connection."""
    below: Any = store
    while below not in _sockets and hasattr(below, "underlying_store"):
        below = below.underlying_store
    shut(_sockets.get(below, set()))


def missing_after(
    ranks: Ranks,
    store: Store,
    keys: Sequence[str],
    is_over: Callable[[], bool] = lambda: False,
) -> Missing | None:
    """Wait for a key of each rank, no longer than ``ranks.timeout_s``.

    Args:
        ranks: Who is waited for.
        store: Where the keys are.
        keys: One of each rank, in their order.
        is_over: Is asked meanwhile; the time is up when it says so.

    Returns:
        Who did not come; ``None``: all came. The wait ends early where a rank that did
        not come has ended: its key will never be there.
    """
    began_s = time.perf_counter()
    pause_s = _POLL_S
    missing = list(range(len(keys)))
    watch = Wait(ranks.presence)
    while True:
        lost = watch.lost(ranks.names[i] for i in missing)
        # Asked after the look: an ended rank's key is there by now or never.
        missing = [i for i in missing if not store.check([keys[i]])]
        if not missing:
            return None
        waited_s = time.perf_counter() - began_s
        gone = [i for i in missing if ranks.names[i] in lost]
        if gone:
            return Missing(missing, waited_s, who_is_gone(ranks, gone, lost))
        if waited_s > ranks.timeout_s or is_over():
            return Missing(missing, waited_s, None)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _POLL_MOST_S)


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that did not come."""

    ranks: list[int]

    waited_s: float

    gone: str | None
    """Who has ended and how, for a message; ``None``: nobody is known to have."""


def store_lost(ranks: Ranks, purpose: str, cause: RuntimeError) -> CommTimeout:
    """Return the error for a store that does not answer."""
    state = State.UNKNOWN
    if ranks.presence is not None:
        state = ranks.presence.state(ranks.names[0])
    what = {
        State.RUNS: f"{ranks.name(0)} is stuck, or the network is gone",
        State.STOPPED: f"{ranks.name(0)} is stuck (it {State.STOPPED.value})",
        State.ENDED: f"{ranks.name(0)} is gone",
        State.UNKNOWN: f"{ranks.name(0)} is gone, or the network is",
    }
    return CommTimeout(
        f"{ranks.name(ranks.rank)} can't {purpose}: the store, which {ranks.name(0)} "
        f"or the launcher holds, does not answer: {what[state]}. Look at the log of "
        f"{ranks.name(0)} first. Cause: {str(cause).splitlines()[0]}"
    )


def who_is_gone(ranks: Ranks, gone: Sequence[int], how: Mapping[int, str]) -> str:
    """Return what to say of ranks that have ended, with where to look.

    Args:
        ranks: Of whom ``gone`` are some.
        gone: Those whose processes have ended. Of several, those are named that did
            not end because another did.
        how: What is known of each, by its global number.
    """
    named = [ranks.names[r] for r in gone]
    if ranks.presence is not None:
        named = ranks.presence.causes(named)
    who = ranks.name_all([r for r in gone if ranks.names[r] in named])
    verb = "is" if len(named) == 1 else "are"
    what = "; ".join(how[name] for name in named)
    return f"{who} {verb} gone ({what}). Look at the log of {who} first."


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
        self._lost: RuntimeError | None = None

    @cached_property
    def serial(self) -> int:
        """Which of the group's models this is: equal on all ranks.

        Taken when it is first asked for, which all ranks do in one order. A model that
        one rank copies for itself alone never asks, so it shifts nobody's numbers.
        """
        # A counter inside the store rather than in this process: it begins anew
        # with the store, so it is the same on all ranks also after a restart.
        return self._ranks.store.add(f"serial/{self._ranks.rank}", 1)

    @property
    def number(self) -> int | None:
        """The model's `serial`, where it was asked for already."""
        return self.__dict__.get("serial")

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

    def others_wait(self) -> str:
        """Return a sentence on ranks that came to a meeting that this one did not.

        Empty where there are none or the store does not answer. Nobody is waited for.
        """
        try:
            found: dict[str, list[int]] = {}
            for rank in range(self._ranks.size):
                key = f"{self._meeting}/{rank}"
                if self._lost is None and self._store.check([key]):
                    purpose = json.loads(self._store.get(key))["purpose"]
                    found.setdefault(purpose, []).append(rank)
        except RuntimeError:
            return ""
        return " ".join(
            f"Meanwhile {self._ranks.name_all(ranks)} came to {purpose}, which "
            f"{self._ranks.name(self._ranks.rank)} did not: ranks make different calls."
            for purpose, ranks in found.items()
        )

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
        if self._lost is not None:
            raise store_lost(ranks, purpose, self._lost)
        try:
            return self._exchange_in_store(purpose, mine)
        except RuntimeError as exc:
            if isinstance(exc, StrettoError):
                raise
            # Late answers would be taken for those to later requests.
            self._lost = exc
            raise store_lost(ranks, purpose, exc) from exc

    # Note [One decision per meeting]
    # A rank whose time is up while the last one comes would stop where others go on.
    # So whoever has seen all the others, or has given up, tries to write the meeting's
    # decision; the store keeps the first, and every rank does what is written there.

    def _exchange_in_store(self, purpose: str, mine: str) -> list[str]:
        ranks, store = self._ranks, self._store
        meeting, self._meeting = self._meeting, self._meeting + 1
        keys = [f"{meeting}/{rank}" for rank in range(ranks.size)]
        store.set(keys[ranks.rank], mine)
        missing = missing_after(ranks, store, keys, self.is_over)
        mine = "go" if missing is None else f"stop{missing.gone or ''}"
        decision = store.compare_set(f"{meeting}/end", "", mine).decode()
        if decision != "go":
            gone = decision.removeprefix("stop")
            raise CommTimeout(self._not_come(purpose, missing, gone))
        if ranks.presence is not None:
            ranks.presence.learn(ranks.names)
        found = [value.decode() for value in _values(store, keys)]
        if meeting > 0:
            # All came to this meeting, so all have read what the last one left.
            store.delete_key(f"{meeting - 1}/{ranks.rank}")
            if ranks.rank == 0:
                store.delete_key(f"{meeting - 1}/end")
        return found

    def _not_come(self, purpose: str, missing: Missing | None, gone: str) -> str:
        """Return what to say of a meeting that ended without some rank."""
        ranks = self._ranks
        mine = ranks.name(ranks.rank)
        if gone:
            return f"{mine} can't {purpose}: {gone}"
        if missing is None:
            return (
                f"{mine} came after others had stopped waiting for it to {purpose}. "
                f"Look at the log of {mine}: it hung, or did something else."
            )
        known = "; ".join(
            row
            for r in missing.ranks
            if ranks.presence and (row := ranks.presence.describe(ranks.names[r]))
        )
        return (
            f"{mine} waited {ranks.timeout_s:g} s for "
            f"{ranks.name_all(missing.ranks)} to {purpose}"
            f"{f' ({known})' if known else ''}. Look at the log of what did not come: "
            "it ended, hangs, or does something else."
        )


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
