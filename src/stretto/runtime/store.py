"""Connections to a group's store, and waiting for its keys."""

from __future__ import annotations

import contextlib
import numbers
import socket
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import CommTimeout, SpecError
from stretto.logs import get_logger
from stretto.process_identity import ProcessState
from stretto.runtime.presence import Presence, Wait, call_aside
from stretto.runtime.ranks import Ranks
from stretto.runtime.sockets import (
    Socket,
    bound_answers,
    connections_to,
    open_sockets,
    shut,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = get_logger(__name__)

_POLL_S = 0.0003  # ranks mostly arrive at a meeting together
_MAX_POLL_S = 0.1

MIN_ANSWER_S = 1.0
"""Shortest time that a store has for an answer, however short the timeout is."""


def _is_time(value: object) -> bool:
    """Return whether a value is a number of seconds, as Python or NumPy has it."""
    return isinstance(value, numbers.Real) and float(value) > 0


def ranks_of(
    group: dist.ProcessGroup,
    *,
    timeout_s: float | None,
    is_over: Callable[[], bool] = lambda: False,
) -> Ranks:
    """Return this process's place in a group.

    ``timeout_s=None`` uses the group's own timeout. A group that a program has made by
    itself, without `torch.distributed.new_group`, has no store: its ranks can't meet.
    Once ``is_over`` returns True, nothing waits for a connection to the store.

    Raises:
        CommTimeout: the store does not answer, or it is over.
        SpecError: ``timeout_s`` is no time.
    """
    if timeout_s is not None and not _is_time(timeout_s):
        raise SpecError(f"timeout_s must be a number above 0, got {timeout_s!r}")
    if group not in dist.distributed_c10d._world.pg_map:  # noqa: SLF001
        return Ranks(
            rank=group.rank(),
            size=group.size(),
            names=tuple(range(group.size())),
            store=cast("Any", dist).HashStore(),
            timeout_s=timeout_s or MIN_ANSWER_S,
        )
    if timeout_s is None:
        timeout_s = _group_timeout_s(group)
    store = PrefixStore("stretto", _store_of(group, is_over))
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
        is_over=is_over,
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


def _store_of(group: dist.ProcessGroup, is_over: Callable[[], bool]) -> Store:
    """Return stretto's connection to a group's store."""
    found = _connections.get(group)
    if found is None:
        if hasattr(group, "get_group_store"):
            theirs = group.get_group_store()
        else:
            theirs = dist.distributed_c10d._world.pg_map[group][1]  # noqa: SLF001
        # MPI has no store; the features that need one run on Gloo and NCCL.
        found = dist.HashStore() if theirs is None else _connect(theirs, group, is_over)
        _connections[group] = found
    return found


def _connect(
    theirs: Store, group: dist.ProcessGroup, is_over: Callable[[], bool]
) -> Store:
    """Return stretto's own connection to the store of a group.

    Raises:
        CommTimeout: the store does not answer, or the group's ranks have parted.
    """
    limit_s = max(MIN_ANSWER_S, _group_timeout_s(group))
    deadline = time.perf_counter() + limit_s
    # A request on the group's own connection has no timeout: if the store's process
    # is stopped, the thread is left behind in the request.
    ended, found = call_aside(
        partial(_clone, theirs, limit_s),
        name="stretto-connecting",
        # What ends a group shuts each new connection, which is then tried again.
        look=lambda: is_over() or time.perf_counter() > deadline,
    )
    if not ended and is_over():
        raise CommTimeout(
            f"rank {dist.get_rank()}: the ranks of this group have parted while it "
            "connected to their store"
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
    limit_s = max(MIN_ANSWER_S, ranks.timeout_s if limit_s is None else limit_s)
    watch = Wait(ranks.presence)
    deadline = time.perf_counter() + max(limit_s, ranks.timeout_s)

    def is_hopeless() -> bool:
        lost = ranks.is_over() or watch.lost(ranks.names[:1])
        return bool(lost) or time.perf_counter() > deadline

    # If no process listens anymore, connecting is retried for many minutes.
    ended, found = call_aside(
        partial(_clone, ranks.store, limit_s),
        name="stretto-connecting",
        look=is_hopeless,
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
        socket.create_connection((below.host, below.port), MIN_ANSWER_S).close()
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
            return Missing(missing, waited_s, loss_message(ranks, gone, lost))
        if waited_s > ranks.timeout_s or is_over():
            return Missing(missing, waited_s, None)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that did not arrive."""

    ranks: list[int]

    waited_s: float

    gone: str | None
    """The ranks that ended and how, for a message; ``None`` if none is known."""

    def reason(self, ranks: Ranks) -> str:
        """Return why the wait for these ranks ended, for a message."""
        return self.gone or (
            f"{ranks.name_all(self.ranks)} did not arrive within {self.waited_s:g} s. "
            "Check the logs of the missing ranks."
        )


def store_lost(ranks: Ranks, purpose: str, cause: Exception) -> CommTimeout:
    """Return the error for a store that does not answer."""
    state = ProcessState.UNKNOWN
    if ranks.presence is not None:
        state = ranks.presence.state(ranks.names[0])
    stuck = f"it {ProcessState.STOPPED.value}"
    what = {
        ProcessState.RUNS: f"{ranks.name(0)} is stuck, or the network is gone",
        ProcessState.STOPPED: f"{ranks.name(0)} is stuck ({stuck})",
        ProcessState.ENDED: f"{ranks.name(0)} is gone",
        ProcessState.UNKNOWN: f"{ranks.name(0)} is gone, or the network is",
    }
    return CommTimeout(
        f"{ranks.name(ranks.rank)} can't {purpose}: the store, held by {ranks.name(0)} "
        f"or the launcher, does not answer: {what[state]}. Check the log of "
        f"{ranks.name(0)} first. Cause: {str(cause).splitlines()[0]}"
    )


def loss_message(ranks: Ranks, gone: Sequence[int], how: Mapping[int, str]) -> str:
    """Return the message about ranks that have ended, with the log to check.

    Args:
        ranks: The ranks of the group.
        gone: Ranks whose processes have ended. If there are several, the message names
            those that did not end because of another, if that is known.
        how: What is known of each, by global number.
    """
    named = [ranks.names[r] for r in gone]
    if ranks.presence is not None:
        causes = ranks.presence.causes(named)
        if causes is None:
            who = ranks.name_all(gone)
            what = "; ".join(how[name] for name in named)
            return (
                f"not heard from: {who} ({what}). Which ended first is unknown, since "
                f"the store has ended too. Check the logs of {who}."
            )
        named = causes
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
