"""Compare values on all ranks before anything depends on them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto._version import __version__
from stretto.errors import CommTimeout, RankDisagreement, StrettoError
from stretto.logs import get_logger
from stretto.runtime.presence import Presence, State, Wait, call_aside
from stretto.runtime.sockets import (
    Socket,
    bound_answers,
    connections_to,
    open_sockets,
    shut,
)
from stretto.schema import tensors_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.schema import Plan

_log = get_logger(__name__)


class TensorRow(NamedTuple):
    """One parameter that requires a gradient."""

    name: str

    bytes: int

    dtype: str


_POLL_S = 0.0003  # ranks mostly arrive at a meeting together
_POLL_MOST_S = 0.1

LEAST_ANSWER_S = 1.0
"""Least time that a store has for an answer, however short the timeout is."""


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

    def name(self, rank: int) -> str:
        """Return ``rank 3``, with the global number."""
        return f"rank {self.names[rank]}"

    def name_all(self, ranks: Sequence[int]) -> str:
        """Return ``rank 1`` or ``ranks 0, 2``, with the global numbers."""
        numbers = ", ".join(str(self.names[r]) for r in ranks)
        return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def ranks_of(group: dist.ProcessGroup, *, timeout_s: float | None) -> Ranks:
    """Return this process's place in a group.

    ``timeout_s=None`` uses the group's own timeout.
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
# share one connection, on which nothing blocks (`missing_after` polls), and code that
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
        # MPI has no store; the features that need one run on Gloo and NCCL.
        found = dist.HashStore() if theirs is None else _connect(theirs, group)
        _connections[group] = found
    return found


def _connect(theirs: Store, group: dist.ProcessGroup) -> Store:
    """Return stretto's own connection to the store of a group.

    Raises:
        CommTimeout: the store does not answer.
    """
    limit_s = max(LEAST_ANSWER_S, _group_timeout_s(group))
    deadline = time.perf_counter() + limit_s
    # A request on the group's own connection has no timeout: if the store's process
    # is stopped, the thread is left behind in the request.
    ended, found = call_aside(
        partial(_clone, theirs, limit_s),
        name="stretto-connecting",
        look=lambda: time.perf_counter() > deadline,
    )
    if not ended:
        raise CommTimeout(
            f"rank {dist.get_rank()}: the store, held by rank 0 or the launcher, "
            f"did not answer for {limit_s:g} s. Check the log of rank 0 first."
        )
    return cast("Store", found)


def own_connection(ranks: Ranks, *, limit_s: float | None = None) -> Store:
    """Return the ranks' store over a separate connection.

    Use it wherever a thread may block in the store. A store that can't be cloned, or
    that does not answer, is returned unchanged: the next request reports the failure.
    On the new connection a request fails if its answer takes longer than ``limit_s``
    (``None``: the ranks' timeout); the connection is unusable then, and its owner drops
    it.
    """
    limit_s = max(LEAST_ANSWER_S, ranks.timeout_s if limit_s is None else limit_s)
    watch = Wait(ranks.presence)
    deadline = time.perf_counter() + max(limit_s, ranks.timeout_s)

    def in_vain() -> bool:
        return bool(watch.lost(ranks.names[:1])) or time.perf_counter() > deadline

    # If no process listens any more, connecting is retried for many minutes.
    ended, found = call_aside(
        partial(_clone, ranks.store, limit_s), name="stretto-connecting", look=in_vain
    )
    return cast("Store", found) if ended else ranks.store


def _clone(store: Store, limit_s: float) -> Store:
    cloned: Any = store
    try:
        # A clone connects again, and retries for more than twice the store's timeout if
        # no process listens; a request on the open connection fails at once.
        store.check(["stretto"])
        before = open_sockets()
        found = cast("Store", cloned.clone())
    except (AttributeError, RuntimeError) as exc:
        _log.debug("cannot clone the store: %s", str(exc).splitlines()[0])
        return store
    mine = connections_to(open_sockets() - before, found)
    bound_answers(mine, limit_s)
    _sockets[found] = mine
    return found


_sockets: weakref.WeakKeyDictionary[Store, set[Socket]] = weakref.WeakKeyDictionary()


def store_listens(store: Store) -> bool:
    """Return whether the store's process accepts a new connection.

    False for a store that is not reached over TCP.
    """
    below: Any = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    try:
        socket.create_connection((below.host, below.port), LEAST_ANSWER_S).close()
    except (AttributeError, OSError):
        return False
    return True


def end_requests(store: Store) -> None:
    """End requests that wait on an `own_connection`, and the connection."""
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
    """Wait for a key of each rank, at most ``ranks.timeout_s``.

    Args:
        ranks: The ranks to wait for.
        store: The store of the keys.
        keys: One key per rank, in rank order.
        is_over: Polled during the wait; the wait ends when it returns True.

    Returns:
        The missing ranks, or ``None`` if all arrived. The wait ends early if a missing
        rank's process has ended: its key will never appear.
    """
    began_s = time.perf_counter()
    pause_s = _POLL_S
    missing = list(range(len(keys)))
    watch = Wait(ranks.presence)
    while True:
        lost = watch.lost(ranks.names[i] for i in missing)
        # Check after the look: an ended rank's key exists by now or never will.
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
    """Ranks that did not arrive."""

    ranks: list[int]

    waited_s: float

    gone: str | None
    """The ranks that ended and how, for a message; ``None`` if none is known."""


def store_lost(ranks: Ranks, purpose: str, cause: Exception) -> CommTimeout:
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
        f"{ranks.name(ranks.rank)} can't {purpose}: the store, held by {ranks.name(0)} "
        f"or the launcher, does not answer: {what[state]}. Check the log of "
        f"{ranks.name(0)} first. Cause: {str(cause).splitlines()[0]}"
    )


def who_is_gone(ranks: Ranks, gone: Sequence[int], how: Mapping[int, str]) -> str:
    """Return the message about ranks that have ended, with the log to check.

    Args:
        ranks: The ranks of the group.
        gone: Ranks whose processes have ended. If there are several, the message names
            those that did not end because of another.
        how: What is known of each, by global number.
    """
    named = [ranks.names[r] for r in gone]
    if ranks.presence is not None:
        named = ranks.presence.causes(named)
    who = ranks.name_all([r for r in gone if ranks.names[r] in named])
    verb = "is" if len(named) == 1 else "are"
    what = "; ".join(how[name] for name in named)
    return f"{who} {verb} gone ({what}). Check the log of {who} first."


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

    Every rank must call `require_same` the same number of times in the same order. The
    purpose of each call is compared too, so ranks that enter the same meeting with
    different intents get an error.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._meeting = 0
        self.is_over: Callable[[], bool] = lambda: False
        """Returns whether a meeting should end without the missing ranks."""
        self._lost: RuntimeError | None = None

    @cached_property
    def serial(self) -> int:
        """The number of this model in the group, equal on all ranks.

        It is assigned on first access, which all ranks do in the same order. A model
        that only one rank copies never reads it, so it does not shift other ranks'
        numbers.
        """
        # The counter is inside the store rather than in this process: it restarts with
        # the store, so it is the same on all ranks after a restart too.
        return self._ranks.store.add(f"serial/{self._ranks.rank}", 1)

    @property
    def number(self) -> int | None:
        """The model's `serial` if it was already assigned, else None."""
        return self.__dict__.get("serial")

    @cached_property
    def _store(self) -> Store:
        return PrefixStore(f"agree/{self.serial}", self._ranks.store)

    def require_same(self, purpose: str, values: Mapping[str, str]) -> None:
        """Require that all ranks pass equal values.

        A value under ``trouble`` is not compared: if any rank has one, every other rank
        gets an error. Such a rank may leave out values that it does not know. Either
        every rank returns or every live rank raises: it never happens that some
        continue while others stop.

        Raises:
            RankDisagreement: on every rank, with the values and their ranks.
            CommTimeout: some ranks did not arrive in time, or the store is lost; the
                message names them.
        """
        rows = self._rows(purpose, values)
        # Compare purposes first: with different purposes, other values differ too.
        keys = sorted({k for row in rows for k in row}, key=_order)
        for key in keys:
            if key == "trouble":
                # Options follow: an unusable option necessarily differs.
                self._refuse_trouble(rows)
                continue
            self._refuse_different(key, rows)

    def gather(self, purpose: str, text: str) -> list[str]:
        """Return every rank's text, by rank. A meeting, as `require_same`.

        Raises:
            RankDisagreement: on every rank, when ranks have different purposes.
            CommTimeout: some ranks did not arrive in time, or the store is lost.
        """
        rows = self._rows(purpose, {"text": text})
        self._refuse_different("purpose", rows)
        return [row["text"] for row in rows]

    def others_wait(self) -> str:
        """Return a sentence on ranks that wait at a meeting that this rank skipped.

        Empty if there is no such rank or the store does not answer. Never waits for a
        rank.
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
            f"Meanwhile {self._ranks.name_all(ranks)} tried to {purpose}, which "
            f"{self._ranks.name(self._ranks.rank)} did not: ranks make different calls."
            for purpose, ranks in found.items()
        )

    def _rows(self, purpose: str, values: Mapping[str, str]) -> list[dict[str, str]]:
        mine = json.dumps({"purpose": purpose, **values})
        return [json.loads(value) for value in self._exchange(purpose, mine)]

    def _refuse_different(self, key: str, rows: Sequence[Mapping[str, str]]) -> None:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if key in row or "trouble" not in row:
                ranks_by_value.setdefault(row.get(key, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            raise RankDisagreement(self._difference(key, ranks_by_value), key=key)

    def _refuse_trouble(self, rows: Sequence[Mapping[str, str]]) -> None:
        for rank, row in enumerate(rows):
            if "trouble" in row and rank != self._ranks.rank:
                raise RankDisagreement(
                    f"{self._ranks.name(rank)} cannot continue: {row['trouble']}"
                )

    def _difference(self, key: str, ranks_by_value: dict[str, list[int]]) -> str:
        parts = [
            f"{self._ranks.name_all(ranks)} reported {value}"
            for value, ranks in ranks_by_value.items()
        ]
        remedy = _REMEDY.get(key, _REMEDY["settings"])
        return f"{_KEY_WORDS.get(key, key)}: {'; '.join(parts)}. {remedy}"

    def _exchange(self, purpose: str, mine: str) -> list[str]:
        """Return every rank's value, by rank."""
        ranks = self._ranks
        if self._lost is not None:
            raise store_lost(ranks, purpose, self._lost)
        try:
            return self._exchange_in_store(purpose, mine)
        except RuntimeError as exc:
            if isinstance(exc, StrettoError):
                raise
            # A late answer would be mistaken for the answer to a later request.
            self._lost = exc
            raise store_lost(ranks, purpose, exc) from exc

    # Note [One decision per meeting]
    # A rank whose time runs out while the last rank arrives would stop where others
    # continue. So every rank that has seen all the others, or has given up, tries to
    # write the meeting's decision; the store keeps the first one, and every rank
    # follows it.

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
            # All ranks entered this meeting, so all have read the last one's keys.
            store.delete_key(f"{meeting - 1}/{ranks.rank}")
            if ranks.rank == 0:
                store.delete_key(f"{meeting - 1}/end")
        return found

    def _not_come(self, purpose: str, missing: Missing | None, gone: str) -> str:
        """Return the message about a meeting that ended without some rank."""
        ranks = self._ranks
        mine = ranks.name(ranks.rank)
        if gone:
            return f"{mine} can't {purpose}: {gone}"
        if missing is None:
            return (
                f"{mine} arrived after others had stopped waiting for it to {purpose}. "
                f"Check the log of {mine}: it hung, or took another code path."
            )
        known = "; ".join(
            row
            for r in missing.ranks
            if ranks.presence and (row := ranks.presence.describe(ranks.names[r]))
        )
        return (
            f"{mine} waited {ranks.timeout_s:g} s for "
            f"{ranks.name_all(missing.ranks)} to {purpose}"
            f"{f' ({known})' if known else ''}. Check the logs of the missing ranks: "
            "they exited, hung, or took another code path."
        )


def _values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of the keys, in one request if the store supports it."""
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
    "settings": "ranks have different settings",
}
_KEY_ORDER = {key: i for i, key in enumerate((*_KEY_WORDS, "trouble"))}


def _order(key: str) -> tuple[int, str]:
    """Return the sort key of a compared value; options come last."""
    return _KEY_ORDER.get(key, len(_KEY_ORDER)), key


_REMEDY = {
    "purpose": "Build models and apply plans in the same order on every rank.",
    "stretto": "Install one version everywhere.",
    "torch": "Install one version everywhere.",
    "model": "Build the model with the same code and options on every rank.",
    "plan": "Give every rank the same plan file.",
    "settings": "Give every rank the same arguments and environment.",
}


def timeout_of(seconds: float) -> timedelta:
    """Return a timeout in the type of torch.distributed."""
    return timedelta(seconds=seconds)


_log = get_logger(__name__)


def require_matching_setup(
    agreement: Agreement,
    ranks: Ranks,
    *,
    purpose: str,
    rows: Sequence[TensorRow],
    plan: Plan | None,
    trouble: StrettoError | None,
    settings: Mapping[str, str],
) -> None:
    """Require that all ranks have the same versions, model and plan.

    ``trouble`` is the error that prevents this rank from executing the plan;
    ``settings`` are
    options that must be equal, by name.

    Raises:
        StrettoError: ``trouble``, if there is any.
        RankDisagreement: ranks differ, or another rank reports an error.
        CommTimeout: a rank did not arrive.
    """
    if ranks.size > 1:
        values = {
            "stretto": __version__,
            "torch": torch.__version__,
            "model": (
                f"{len(rows)} tensors of {sum(r.bytes for r in rows)} bytes, "
                f"{tensors_digest(rows)}"
            ),
            "plan": "no plan" if plan is None else plan.digest,
            "settings": f"timeout_s={ranks.timeout_s:g}",
            **{f"option {name}": value for name, value in settings.items()},
        }
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            agreement.require_same(purpose, values)
        except RankDisagreement:
            if trouble is None:
                raise  # this rank's own error is more specific
    if trouble is not None:
        raise trouble
    if plan is not None and plan.ranks != ranks.size and not ranks.rank:
        _log.warning(
            "%s: the plan was made for %d ranks, but the job has %d: it is executed, "
            "but may not be the best",
            ranks.name(0),
            plan.ranks,
            ranks.size,
        )


def require_plan_applied(
    agreement: Agreement, ranks: Ranks, plan: Plan | None, trouble: Exception | None
) -> None:
    """Require that a plan's lanes are open on every rank.

    Raises:
        Exception: ``trouble``, if there is any.
        RankDisagreement: another rank failed.
        CommTimeout: a rank did not arrive.
    """
    gone = isinstance(trouble, CommTimeout)  # others have or will get the same error
    if ranks.size > 1 and not gone:
        values = {"plan": "no plan" if plan is None else plan.digest}
        if trouble is not None:
            values["trouble"] = str(trouble)
        try:
            agreement.require_same("take up a plan", values)
        except RankDisagreement:
            if trouble is None:
                raise
    if trouble is not None:
        raise trouble
