"""Find the ranks that share a host."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout, StrettoError
from stretto.process_identity import host_name
from stretto.runtime.store import missing_after, store_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.rank_variables import Place
    from stretto.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A rank's place among the ranks of its host, and among hosts."""

    local_rank: int

    local_size: int

    cross_rank: int
    """Rank among the ranks with this local rank on all hosts."""

    cross_size: int
    """Number of hosts that have a rank with this local rank."""

    is_homogeneous: bool
    """Whether all hosts have the same number of ranks."""


def arrange(hosts: Sequence[str], local_ranks: Sequence[int], rank: int) -> Topology:
    """Return the topology, from each rank's host and its place there."""
    sizes = {host: hosts.count(host) for host in hosts}
    mine = hosts[rank]
    local_rank = local_ranks[rank]
    order = list(dict.fromkeys(hosts))
    peers = sorted(
        order.index(host)
        for host, local in zip(hosts, local_ranks, strict=True)
        if local == local_rank
    )
    return Topology(
        local_rank=local_rank,
        local_size=sizes[mine],
        cross_rank=peers.index(order.index(mine)),
        cross_size=len(peers),
        is_homogeneous=len(set(sizes.values())) == 1,
    )


def without_gaps(hosts: Sequence[str], local_ranks: Sequence[int]) -> list[int]:
    """Return each rank's place among those of its host, in the order of old places."""
    places = list(zip(hosts, local_ranks, range(len(hosts)), strict=True))
    return [
        sum(other[0] == place[0] and other[1:] < place[1:] for other in places)
        for place in places
    ]


def exchange(
    ranks: Ranks, place: Place | None, *, closes_gaps: bool = False
) -> Topology:
    """Return the topology, from what every rank reports about itself.

    A launcher's numbers take precedence over host names, which several hosts may share.
    With ``closes_gaps``, those of ranks that are lost are given to the next ones of the
    host.
    """
    host, local_rank = host_name(), None
    if place is not None and place.local_rank is not None:
        local_rank = place.local_rank
        if place.host is not None:
            host = f"number {place.host}"
    if ranks.size == 1:
        return arrange([host], [local_rank or 0], 0)
    try:
        table = _places_of_all(ranks, [host, local_rank])
    except RuntimeError as exc:
        if isinstance(exc, StrettoError):
            raise
        raise store_lost(ranks, "call hvd.init()", exc) from exc
    hosts = [row[0] for row in table]
    local_ranks = [
        hosts[:rank].count(host) if given is None else given
        for rank, (host, given) in enumerate(table)
    ]
    if closes_gaps:
        local_ranks = without_gaps(hosts, local_ranks)
    return arrange(hosts, local_ranks, ranks.rank)


def _places_of_all(ranks: Ranks, mine: list[Any]) -> list[list[Any]]:
    """Return every rank's reported place, by rank."""
    store = PrefixStore("hosts", ranks.store)
    store.set(str(ranks.rank), json.dumps(mine))
    keys = [str(rank) for rank in range(ranks.size)]
    missing = missing_after(ranks, store, keys, ranks.is_over)
    if missing is not None:
        who = ranks.name_all(missing.ranks)
        gone = f" {missing.gone}" if missing.gone else ""
        raise CommTimeout(
            f"{ranks.name(ranks.rank)}: hvd.init() waited {missing.waited_s:.3g} s for "
            f"{who} to report its host.{gone} Check the log of {who}: it exited, hung, "
            "or took another code path."
        )
    return [json.loads(store.get(key)) for key in keys]
