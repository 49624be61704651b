"""Find the ranks of a job.

# Note [A store that outlives shutdown]
A process group made by `init` ends with `shutdown`; its store does not. A new store at
the same address would have to wait until the old one is gone on every rank, and the
agent's store under torchrun keeps its keys. So a process has one store, and each `init`
has its own keys in it, numbered by a counter in the store.
"""

from __future__ import annotations

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

from stretto.runtime import backends
from stretto.runtime.ranks import Ranks
from stretto.runtime.store import ranks_of, store_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.rank_variables import Place

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]

_hooks: dict[Any, tuple[Any, Any]] = {}
_stores: dict[tuple[str, int, int, int], Store] = {}


def meet(
    place: Place | None, *, members: Sequence[int] | None, timeout_s: float | None
) -> tuple[Ranks, Any]:
    """Return the ranks, and the process group that was made for them, if any.

    An existing process group is used; otherwise one is made over the store at the
    launcher's address; a process without a launcher is a single rank. ``members`` are
    the participating ranks of the job; the others must not call this.

    Raises:
        ValueError: this rank is not one of ``members``.
        RuntimeError: rank 0 was not found at its address.
    """
    made = None
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        ranks = ranks_of(group, timeout_s=timeout_s)
    elif place is None or place.size == 1:
        ranks = Ranks(
            rank=0,
            size=1,
            names=(0,),
            store=_HashStore(),
            timeout_s=timeout_s or default_pg_timeout.total_seconds(),
        )
    else:
        made, ranks = _make_group(place, timeout_s)
    store = PrefixStore("horovod", ranks.store)
    try:
        serial = store.add(f"serial/{ranks.rank}", 1)
    except RuntimeError as exc:
        raise store_lost(ranks, "call hvd.init()", exc) from exc
    store = PrefixStore(f"{serial}", store)
    ranks = dataclasses.replace(ranks, store=store)
    return (ranks if members is None else _part(ranks, members)), made


def _part(ranks: Ranks, members: Sequence[int]) -> Ranks:
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


def _make_group(place: Place, timeout_s: float | None) -> tuple[Any, Ranks]:
    key = (place.address, place.port, place.rank, place.size)
    if key not in _stores:
        found = rendezvous(
            f"tcp://{place.address}:{place.port}", place.rank, place.size
        )
        _stores[key] = next(iter(found))[0]
    outer = _stores[key]
    serial = outer.add(f"horovod/groups/{place.rank}", 1)
    hook = sys.excepthook
    dist.init_process_group(
        # On a GPU, the tensors' device selects the backend.
        backends.process_group_backend(),
        store=PrefixStore(f"horovod/{serial}", outer),
        rank=place.rank,
        world_size=place.size,
        timeout=default_pg_timeout
        if timeout_s is None
        else timedelta(seconds=timeout_s),
    )
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    _hooks[group] = (hook, sys.excepthook)
    return group, ranks_of(group, timeout_s=timeout_s)


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
