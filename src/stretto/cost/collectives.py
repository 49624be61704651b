"""Start-up and volume of all-reduce algorithms.

An algorithm is two numbers: how many latencies it pays one after another
(`startup_steps`), and how many bytes cross the busiest link, in one direction, per
byte of the message (`wire_factor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.schema import Cluster, Link


def wire_factor(algorithm: str, ranks: int, *, ranks_per_host: int = 1) -> float:
    r"""Bytes on the busiest link, one direction, per byte of the message.

    With $p$ = ``ranks`` and $n$ = ``ranks`` / ``ranks_per_host`` hosts:

    - ``ring``: $2(p-1)/p$. Neighbours sit beside each other, so the ring crosses each
      host's network link once per direction whatever the number of its ranks.
    - ``halving_doubling``: $2(p-1)/p$ for a power of two; else, with $q$ the power of
      two below, $2(q-1)/q + 2$: the ranks beyond hand their message to a partner
      before and get the result back after.
    - ``tree``: 2 (double binary tree, pipelined).
    - ``hierarchical``: $2(n-1)/n$ on the link between hosts; what crosses the links
      within a host is in `collective_cost`.

    Sources: Thakur et al., IJHPCA 19(1), 2005; Sanders et al., Parallel Computing
    35(12), 2009 (tree).

    Raises:
        SpecError: the algorithm is unknown, or the ranks do not fill the hosts.
    """
    hosts = _num_hosts(ranks, ranks_per_host)
    if ranks == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (ranks - 1) / ranks
    if algorithm == "halving_doubling":
        power = 1 << (ranks.bit_length() - 1)
        return 2 * (power - 1) / power + (2 if power != ranks else 0)
    if algorithm == "tree":
        return 2.0
    if algorithm == "hierarchical":
        return 2 * (hosts - 1) / hosts if hosts > 1 else 2 * (ranks - 1) / ranks
    raise _unknown(algorithm)


def startup_steps(algorithm: str, ranks: int, *, ranks_per_host: int = 1) -> int:
    r"""Latencies that an all-reduce pays one after another.

    With $p$ = ``ranks``: ``ring`` $2(p-1)$; ``halving_doubling`` $2\log_2 q$ and 2
    more where $p$ exceeds $q$, the power of two below; ``tree``
    $2\lceil\log_2 p\rceil$; ``hierarchical`` $2(g-1) + 2(n-1)$: rings within the hosts
    of $g$ ranks, then a ring over $n$ hosts.

    Raises:
        SpecError: the algorithm is unknown, or the ranks do not fill the hosts.
    """
    hosts = _num_hosts(ranks, ranks_per_host)
    if algorithm == "ring":
        return 2 * (ranks - 1)
    if algorithm == "halving_doubling":
        log2 = ranks.bit_length() - 1
        return 2 * log2 + (2 if ranks != 1 << log2 else 0)
    if algorithm == "tree":
        return 2 * (ranks - 1).bit_length()
    if algorithm == "hierarchical":
        return 2 * (ranks_per_host - 1) + 2 * (hosts - 1)
    raise _unknown(algorithm)


def ring_all_reduce_s(size_bytes: int, ranks: int, link: Link) -> float:
    r"""Time of a ring all-reduce that has its links for itself, in seconds.

    $T = 2(p-1)\,\alpha + 2\frac{p-1}{p}\,\beta m$

    with $p$ = ``ranks``, $m$ = ``size_bytes``, $\alpha$ = ``link.latency_s`` and
    $\beta$ = 1 / ``link.flow_bytes_per_s``.

    Holds when all hops are alike and nothing else uses them; reduction arithmetic is
    not counted. Source: Patarasuk and Yuan, JPDC 69(2), 2009.
    """
    return (
        startup_steps("ring", ranks) * link.latency_s
        + wire_factor("ring", ranks) * size_bytes / link.flow_bytes_per_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What one all-reduce over all ranks of a cluster asks of it."""

    startup_s: float
    """Time before the first byte, whatever the size."""

    startup_s_per_byte: float
    """Time per byte of the message off the bottleneck link: ``hierarchical``'s rings
    within the hosts. Other algorithms: 0."""

    wire_factor: float
    """Bytes on the bottleneck link per byte of the message."""


def collective_cost(cluster: Cluster, algorithm: str = "ring") -> CollectiveCost:
    r"""What one all-reduce over all ranks of a cluster asks of it.

    Start-up is ``steps`` latencies of the bottleneck link. Where the cluster has a
    fitted ``allreduce``, which is taken to be a ring over its ``ranks``, a latency is
    ``allreduce.startup_s`` / ``startup_steps("ring", allreduce.ranks)`` instead, so a
    ring over as many ranks as the fit's has the fit's start-up, and other numbers of
    ranks and other algorithms are rescaled by their steps.

    ``hierarchical`` adds $2\frac{g-1}{g} m$ / (rate of a flow within a host) and its
    latencies there; these count as start-up, for they leave the bottleneck free.

    Raises:
        SpecError: the algorithm is unknown.
    """
    ranks, group = cluster.ranks, cluster.ranks_per_host
    factor = wire_factor(algorithm, ranks, ranks_per_host=group)
    steps = startup_steps(algorithm, ranks, ranks_per_host=group)
    latency_s = cluster.bottleneck.latency_s
    if cluster.allreduce is not None:
        fit = cluster.allreduce
        latency_s = fit.startup_s / startup_steps("ring", fit.ranks)
    startup_s, startup_s_per_byte = steps * latency_s, 0.0
    if algorithm == "hierarchical" and cluster.hosts > 1 and group > 1:
        intra = cluster.intra_host
        inner = startup_steps("ring", group)
        startup_s = (steps - inner) * latency_s + inner * intra.latency_s
        startup_s_per_byte = wire_factor("ring", group) / intra.flow_bytes_per_s
    return CollectiveCost(
        startup_s=startup_s,
        startup_s_per_byte=startup_s_per_byte,
        wire_factor=factor,
    )


def _num_hosts(ranks: int, ranks_per_host: int) -> int:
    if ranks < 1 or ranks_per_host < 1 or ranks % ranks_per_host:
        raise SpecError(
            f"ranks must be a positive multiple of ranks_per_host ({ranks_per_host}), "
            f"got {ranks}",
            place=".ranks",
        )
    return ranks // ranks_per_host


def _unknown(algorithm: str) -> SpecError:
    return SpecError(
        "algorithm must be one of ring, halving_doubling, tree, hierarchical, "
        f"got {algorithm!r}",
        place=".algorithm",
    )
