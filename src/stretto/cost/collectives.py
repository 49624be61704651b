"""Start-up and volume of all-reduce algorithms.

Two numbers describe an algorithm: how many latencies it pays one after another
(`startup_steps`), and how many bytes cross the busiest link, in one direction, per byte
of the message (`wire_factor`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.schema.plan import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Link

PARTS = ("all_reduce", "reduce_scatter", "all_gather")
"""The kinds of collective: a whole all-reduce, or one of its halves."""

_TWO_LEVELS = ("hierarchical", "two_level_rails")


def wire_factor(algorithm: str, ranks: int, *, ranks_per_host: int = 1) -> float:
    r"""Return the bytes on the busiest link, in one direction, per byte of the message.

    With $p$ = ``ranks`` and $n$ = ``ranks`` / ``ranks_per_host`` hosts:

    - ``ring``: $2(p-1)/p$. Neighbors are placed next to each other, so the ring crosses
      each host's network link once per direction, whatever its number of ranks.
    - ``halving_doubling``: $2(p-1)/p$ for a power of two; else, with $q$ the power of
      two below, $2(q-1)/q + 2$: each rank beyond $q$ sends its message to a partner
      first and receives the result at the end.
    - ``tree``: 2 (double binary tree, pipelined).
    - ``hierarchical``: $2(n-1)/n$ on the link between hosts, which a host's ranks
      share; `collective_cost` counts what crosses the links within a host.
    - ``two_level_rails``: $2(n-1)/(n g)$: with $g$ = ``ranks_per_host``, each of the
      $g$ ranks of a host has its own network link and sends $1/g$ of the message. The
      factor is per link.
    - ``in_network``: 1: switches reduce on the way up and copy on the way down.

    For ``halving_doubling`` beyond a power of two, the extra transfers run before and
    after the rest, so they count in full although each uses one direction.

    Sources: Thakur et al., IJHPCA 19(1), 2005; Sanders et al., Parallel Computing
    35(12), 2009 (tree); Graham et al., COM-HPC 2016 (in-network).

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
    if algorithm == "in_network":
        return 1.0
    if algorithm in _TWO_LEVELS:
        if hosts == 1:
            return 2 * (ranks - 1) / ranks
        rails = ranks_per_host if algorithm == "two_level_rails" else 1
        return 2 * (hosts - 1) / hosts / rails
    raise _unknown(algorithm)


def startup_steps(algorithm: str, ranks: int, *, ranks_per_host: int = 1) -> int:
    r"""Return the number of latencies that an all-reduce pays one after another.

    With $p$ = ``ranks``: ``ring`` $2(p-1)$; ``halving_doubling`` $2\log_2 q$ and 2
    more where $p$ exceeds $q$, the power of two below; ``tree`` and ``in_network``
    $2\lceil\log_2 p\rceil$; ``hierarchical`` and ``two_level_rails``
    $2(g-1) + 2(n-1)$: rings within the hosts of $g$ ranks, then rings over $n$ hosts.

    Raises:
        SpecError: the algorithm is unknown, or the ranks do not fill the hosts.
    """
    hosts = _num_hosts(ranks, ranks_per_host)
    if algorithm == "ring":
        return 2 * (ranks - 1)
    if algorithm == "halving_doubling":
        log2 = ranks.bit_length() - 1
        return 2 * log2 + (2 if ranks != 1 << log2 else 0)
    if algorithm in ("tree", "in_network"):
        return 2 * (ranks - 1).bit_length()
    if algorithm in _TWO_LEVELS:
        return 2 * (ranks_per_host - 1) + 2 * (hosts - 1)
    raise _unknown(algorithm)


def ring_all_reduce_s(size_bytes: int, ranks: int, link: Link) -> float:
    r"""Return the time of a ring all-reduce that has its links to itself, in seconds.

    $T = 2(p-1)\,\alpha + 2\frac{p-1}{p}\,\beta m$

    with $p$ = ``ranks``, $m$ = ``size_bytes``, $\alpha$ = ``link.latency_s`` and
    $\beta$ = 1 / ``link.flow_bytes_per_s``.

    Holds when all hops are equal and nothing else uses them; reduction arithmetic is
    not counted. Source: Patarasuk and Yuan, JPDC 69(2), 2009.
    """
    return (
        startup_steps("ring", ranks) * link.latency_s
        + wire_factor("ring", ranks) * size_bytes / link.flow_bytes_per_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Cost of one collective over all ranks of a cluster."""

    startup_s: float
    """Time before the first byte, whatever the size."""

    startup_s_per_byte: float
    """Time per byte of the message away from the bottleneck link: the rings within the
    hosts of ``hierarchical`` and ``two_level_rails``. Other algorithms: 0."""

    wire_factor: float
    """Bytes on the bottleneck link per byte of the message."""

    extra: tuple[tuple[float, float], ...] = ()
    """Message sizes, and how much their start-up exceeds ``startup_s``: from the
    cluster's piecewise fit, linear between sizes."""

    @property
    def min_startup_s(self) -> float:
        """The smallest start-up of any message, for use in bounds."""
        return max(0.0, self.startup_s + min((e for _, e in self.extra), default=0.0))

    def extra_s(self, size_bytes: float) -> float:
        """Return a message's start-up beyond ``startup_s``; it may be negative."""
        return interpolated(self.extra, size_bytes)

    def startup_of(self, size_bytes: float) -> float:
        """Return a message's start-up, in seconds."""
        startup_s = self.startup_s
        if self.extra:
            startup_s = max(0.0, startup_s + self.extra_s(size_bytes))
        return startup_s + self.startup_s_per_byte * size_bytes


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value between ascending points: constant beyond them, 0 if empty."""
    if not points:
        return 0.0
    after = bisect_right(points, (at, math.inf))
    if not after or after == len(points):
        return points[min(after, len(points) - 1)][1]
    (low, low_value), (high, high_value) = points[after - 1], points[after]
    return low_value + (high_value - low_value) * (at - low) / (high - low)


def collective_cost(
    cluster: Cluster,
    algorithm: str = "ring",
    *,
    part: str = "all_reduce",
    lanes: int = 1,
) -> CollectiveCost:
    r"""Return the cost of one collective over all ranks of a cluster.

    Start-up is ``steps`` latencies of the bottleneck link. If the cluster has a fitted
    ``allreduce``, which is taken to be a ring over its ``ranks``, a latency is
    ``allreduce.startup_s`` / ``startup_steps("ring", allreduce.ranks)`` instead. A ring
    over the fit's number of ranks then has the fit's start-up, and other numbers of
    ranks and other algorithms scale by their steps.

    ``hierarchical`` and ``two_level_rails`` add $2\frac{g-1}{g} m$ / (rate of a flow
    within a host) and their latencies there. These count as start-up, because they do
    not occupy the bottleneck.

    Where all-reduces start on ``lanes`` at the same time, each lane beyond the first
    adds ``concurrency.startup_per_lane_s`` to the start-up of a ring over the fit's
    number of ranks, and to others in proportion to their steps: a host processor that
    starts one all-reduce cannot start another meanwhile.

    ``part`` ``reduce_scatter`` or ``all_gather`` is that half alone: half of the
    latencies and half of the bytes. For ``tree`` and ``in_network``, which have no
    such halves, they are the reduction to a root and the broadcast from it.

    Raises:
        SpecError: the algorithm or the part is unknown.
    """
    if part not in PARTS:
        raise SpecError(
            f"part must be one of {', '.join(PARTS)}, got {part!r}", place=".part"
        )
    ranks, group = cluster.ranks, cluster.ranks_per_host
    factor = wire_factor(algorithm, ranks, ranks_per_host=group)
    steps = startup_steps(algorithm, ranks, ranks_per_host=group)
    latency_s = cluster.bottleneck.latency_s
    if cluster.allreduce is not None:
        fit = cluster.allreduce
        latency_s = fit.startup_s / startup_steps("ring", fit.ranks)
    crossing = steps
    startup_s, startup_s_per_byte = steps * latency_s, 0.0
    if algorithm in _TWO_LEVELS and cluster.hosts > 1 and group > 1:
        intra = cluster.intra_host
        inner = startup_steps("ring", group)
        crossing = steps - inner
        startup_s = crossing * latency_s + inner * intra.latency_s
        startup_s_per_byte = wire_factor("ring", group) / intra.flow_bytes_per_s
    if cluster.concurrency is not None and lanes > 1:
        of_ranks = ranks if cluster.allreduce is None else cluster.allreduce.ranks
        of_ring = steps / max(1, startup_steps("ring", of_ranks))
        startup_s += of_ring * (lanes - 1) * cluster.concurrency.startup_per_lane_s
    share = 1.0 if part == "all_reduce" else 0.5
    extra: tuple[tuple[float, float], ...] = ()
    if cluster.allreduce is not None and ranks > 1 and cluster.allreduce.extra:
        # Extra start-up per size beyond the fitted line, scaled to this many latencies.
        scale = share * crossing / startup_steps("ring", cluster.allreduce.ranks)
        points = cluster.allreduce.extra
        extra = tuple((p.bytes, scale * p.extra_s) for p in points)
    return CollectiveCost(
        startup_s=share * startup_s,
        startup_s_per_byte=share * startup_s_per_byte,
        wire_factor=share * factor,
        extra=extra,
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
        f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}",
        place=".algorithm",
    )
