"""Change the number of ranks of a cluster's figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.schema import Cluster


def cluster_at(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with another number of ranks: more or fewer hosts.

    Fewer ranks than a host has become one host with that many. On one host nothing
    crosses the network, so figures fitted between hosts (``allreduce``,
    ``concurrency``) are left out.

    Raises:
        SpecError: the ranks do not fill hosts.
    """
    per_host = min(ranks, cluster.ranks_per_host)
    if ranks < 1 or ranks % per_host:
        raise SpecError(
            f"ranks must fill whole hosts of {cluster.ranks_per_host}, or a part of "
            f"one; got {ranks}",
            place=".ranks",
        )
    resized = replace(cluster, hosts=ranks // per_host, ranks_per_host=per_host)
    if resized.hosts == 1 < cluster.hosts:
        resized = replace(resized, allreduce=None, concurrency=None)
    return resized
