"""Find the ranks of a job.

# Note [A store that outlives shutdown]
A process group made by `init` ends with `shutdown`; its store does not. A new store at
the same address would have to wait until the old one is gone on every rank, and the
agent's store under torchrun keeps its keys. So a process has one store, and each `init`
has its own keys in it, numbered as `attempts` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    default_pg_timeout,
)
from torch.distributed.rendezvous import rendezvous

from stretto.errors import StrettoError
from stretto.horovod.attempts import begin_attempt
from stretto.runtime import backends
from stretto.runtime.presence import Presence
from stretto.runtime.ranks import Ranks
from stretto.runtime.store import ranks_of, store_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.rank_variables import Place

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]

_hooks: dict[Any, tuple[Any, Any]] = {}
_stores: dict[tuple[str, int, int, int], Store] = {}


def meet(
    place: Place | None,
    *,
    members: Sequence[int] | None,
    timeout_s: float | None,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Ranks, Any]:
    """Return the ranks, and the process group that was made for them, if any.

    An existing process group is used; otherwise one is made over the store at the
    launcher's address; a process without a launcher is a single rank. ``members`` are
    the participating ranks of the job; the others must not call this, and nothing waits
    for them. Once ``is_over`` returns True, the ranks of an existing process group wait
    for each other no longer.

    Raises:
        ValueError: this rank is not one of ``members``, or they are not ranks.
        CommTimeout: a rank did not arrive in time, or the store is lost.
        RuntimeError: rank 0 was not found at its address.
    """
    made = None
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        ranks = ranks_of(group, timeout_s=timeout_s, is_over=is_over)
    elif place is None or place.size == 1:
        ranks = Ranks(
            rank=0,
            size=1,
            names=(0,),
            store=_HashStore(),
            timeout_s=timeout_s or default_pg_timeout.total_seconds(),
        )
    else:
        made, ranks = _make_group(place, members, timeout_s)
        members = None  # the group is theirs
    try:
        if members is not None:
            ranks = _part(ranks, members)
        return _numbered(ranks), made
    except BaseException:
        part(made)
        raise


_PURPOSE = "call hvd.init()"


def _numbered(ranks: Ranks) -> Ranks:
    """Return the ranks with keys of their own for this `init`, once all have met.

    Raises:
        CommTimeout: a rank did not arrive, or the store is lost.
    """
    store = PrefixStore("horovod", ranks.store)
    try:
        number = begin_attempt(ranks, PrefixStore("attempts", store), _PURPOSE)
    except RuntimeError as exc:
        if isinstance(exc, StrettoError):
            raise
        raise store_lost(ranks, _PURPOSE, exc) from exc
    return dataclasses.replace(ranks, store=PrefixStore(f"{number}", store))


def _part(ranks: Ranks, members: Sequence[int]) -> Ranks:
    """Return the place of this rank among the members.

    Raises:
        ValueError: this rank is not one of them, or they are not ranks of the job.
    """
    known = range(ranks.size)
    if len(set(members)) < len(members) or any(r not in known for r in members):
        raise ValueError(
            f"init(comm={list(members)}): these must be distinct ranks of the job, "
            f"from 0 to {ranks.size - 1}"
        )
    if ranks.rank not in members:
        raise ValueError(
            f"init(comm={list(members)}) was called on {ranks.name(ranks.rank)}, which "
            "is not one of these: only they may call it"
        )
    return dataclasses.replace(
        ranks,
        rank=list(members).index(ranks.rank),
        size=len(members),
        names=tuple(ranks.names[r] for r in members),
        store=PrefixStore(",".join(map(str, members)), ranks.store),
    )


def _make_group(
    place: Place, members: Sequence[int] | None, timeout_s: float | None
) -> tuple[Any, Ranks]:
    limit_s = timeout_s or default_pg_timeout.total_seconds()
    ranks = Ranks(
        rank=place.rank,
        size=place.size,
        names=tuple(range(place.size)),
        store=_HashStore(),
        timeout_s=limit_s,
    )
    if members is not None:
        ranks = _part(ranks, members)
    key = (place.address, place.port, place.rank, place.size)
    if key not in _stores:
        # The job's rank 0 serves the store, and waits for as many as will come.
        found = rendezvous(
            f"tcp://{place.address}:{place.port}", place.rank, ranks.size
        )
        _stores[key] = next(iter(found))[0]
    store = PrefixStore("horovod", _stores[key])
    if members is not None:
        store = PrefixStore(",".join(map(str, members)), store)
    ranks = dataclasses.replace(ranks, store=store)
    hook = sys.excepthook
    try:
        number = begin_attempt(ranks, PrefixStore("attempts", store), _PURPOSE)
        # Ranks meet under a group's number, and an attempt that failed has used one up.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        dist.init_process_group(
            # On a GPU, the tensors' device selects the backend.
            backends.process_group_backend(),
            store=PrefixStore(f"{number}", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=limit_s),
        )
    except RuntimeError as exc:
        if isinstance(exc, StrettoError):
            raise
        raise store_lost(ranks, _PURPOSE, exc) from exc
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    _hooks[group] = (hook, sys.excepthook)
    return group, _named(ranks_of(group, timeout_s=timeout_s), ranks.names)


def _named(ranks: Ranks, names: tuple[int, ...]) -> Ranks:
    """Return the ranks of a group under their numbers in the job."""
    if names == ranks.names:
        return ranks
    presence = Presence(PrefixStore("job", ranks.store), rank=names[ranks.rank])
    with contextlib.suppress(RuntimeError):  # the first meeting reports it
        presence.publish()
    return dataclasses.replace(ranks, names=names, presence=presence)


def part(group: Any) -> None:
    """End a process group that `meet` made, unless it has already ended."""
    if (
        group is not None
        and dist.is_initialized()
        and dist.distributed_c10d._get_default_group() is group  # noqa: SLF001
    ):
        dist.destroy_process_group()
        # Each group's hook calls the previous one: remove it, or they accumulate.
        before, now = _hooks.pop(group)
        if sys.excepthook is now:
            sys.excepthook = before
