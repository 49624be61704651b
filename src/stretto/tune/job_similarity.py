"""Similarity of two jobs: graph edit distance of their computation and topology.

AIACC-Training section VI starts a job from the settings of the most similar earlier
job, by the graph edit distance (Gao et al. 2010) of the computation graph and of the
network topology. The exact distance takes exponential time. Here, all
matchings of the ranks of small topologies are tried. Chains of many tensors use an
alignment: the cheapest edit that keeps the chain's order, an upper bound on the
distance.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Workload

LONGEST_CHAIN = 512
"""Longer chains are aligned after joining neighbors."""

SMALL_RANKS = 6
"""Up to this many ranks the topology's distance is searched; above, it is bounded."""

_OCTAVES = 8.0
"""Sizes this many doublings apart share nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTopology:
    """Ranks on hosts; an edge holds the rate of a flow between two ranks."""

    hosts: int

    ranks_per_host: int

    inter_bytes_per_s: float | None = None
    """``None`` if not measured yet; then rates are not compared."""

    intra_bytes_per_s: float | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host


def chain_of(workload: Workload) -> tuple[int, ...]:
    """Return the computation graph as gradients' bytes in ready order."""
    return tuple(tensor.bytes for tensor in workload.tensors)


def job_distance(
    chains: tuple[Sequence[int], Sequence[int]],
    topologies: tuple[RateTopology, RateTopology],
) -> float:
    """Return the distance of two jobs, 0 (equal) to 1 (nothing shared).

    It is the larger of the chain distance and the topology distance.
    """
    return max(chain_distance(*chains), topology_distance(*topologies))


def chain_distance(first: Sequence[int], second: Sequence[int]) -> float:
    r"""Return the edit distance of two chains of tensors, as a share of the maximum.

    Inserting or deleting a tensor costs 1; replacing bytes $a$ by $b$ costs
    $\min(1, |\log_2(a / b)| / 8)$ times 2, so it never costs more than deleting and
    inserting. Dynamic programming, $O(L^2)$ with rows of arrays.
    """
    one, two = _joined(first), _joined(second)
    if not len(one) or not len(two):
        return 0.0 if len(one) == len(two) else 1.0
    replace = 2 * np.minimum(1.0, np.abs(one[:, None] - two[None, :]) / _OCTAVES)
    width = len(two)
    steps = np.arange(width + 1, dtype=np.float64)
    row = steps.copy()
    for i in range(len(one)):
        best = row + 1.0
        best[1:] = np.minimum(best[1:], row[:-1] + replace[i])
        # Insertions along the row: a running minimum of cost minus position.
        row = np.minimum.accumulate(best - steps) + steps
    return float(row[-1]) / (len(one) + len(two))


def _joined(chain: Sequence[int]) -> Any:
    sizes = np.asarray([max(1, size) for size in chain], dtype=np.float64)
    if len(sizes) > LONGEST_CHAIN:
        parts = np.array_split(sizes, LONGEST_CHAIN)
        sizes = np.array([part.sum() for part in parts])
    return np.log2(sizes)


def topology_distance(first: RateTopology, second: RateTopology) -> float:
    """Return the graph edit distance of two topologies, as a share of building both.

    Nodes are ranks; an edge joins each pair and carries the rate between them, within a
    host or between hosts. Replacing an edge costs the distance of the rates, computed
    as for tensors; rates that were not measured count as equal.
    """
    if first == second:
        return 0.0
    whole = _size(first.ranks) + _size(second.ranks)
    if max(first.ranks, second.ranks) <= SMALL_RANKS:
        return min(1.0, _searched(first, second) / whole)
    return min(1.0, _matched(first, second) / whole)


def _size(ranks: int) -> float:
    return ranks + ranks * (ranks - 1) / 2


def _edge_cost(one: tuple[bool, float | None], two: tuple[bool, float | None]) -> float:
    if one[1] is None or two[1] is None:
        return 0.0 if one[0] == two[0] else 1.0
    return min(1.0, abs(math.log2(one[1] / two[1])) / _OCTAVES)


def _searched(first: RateTopology, second: RateTopology) -> float:
    """Return the exact distance: the cheapest way to match the ranks.

    Both graphs are complete, and replacing an edge never costs more than deleting it.
    So some cheapest edit matches every rank of the smaller topology.
    """
    few, many = sorted((first, second), key=lambda t: t.ranks)
    costs = np.array(
        [
            [_edge_cost(_kind(few, a), _kind(many, b)) for b in (False, True)]
            for a in (False, True)
        ]
    )
    orders = np.array(list(itertools.permutations(range(many.ranks), few.ranks)))
    one, two = np.triu_indices(few.ranks, 1)
    within_few = one // few.ranks_per_host == two // few.ranks_per_host
    hosts = orders // many.ranks_per_host
    within_many = hosts[:, one] == hosts[:, two]
    replaced = costs[within_few.astype(int), within_many.astype(int)].sum(axis=1)
    return _size(many.ranks) - _size(few.ranks) + float(replaced.min())


def _matched(first: RateTopology, second: RateTopology) -> float:
    """Return the cost of matching ranks in order: an upper bound on the distance."""
    few, many = sorted((first, second), key=lambda t: t.ranks)
    cost = _size(many.ranks) - _size(few.ranks)
    # Count edges by kind (within a host, between hosts): there may be thousands of
    # ranks.
    pairs = few.ranks * (few.ranks - 1) // 2
    within = [_pairs_within(t.ranks_per_host, few.ranks) for t in (few, many)]
    both = _pairs_within(math.gcd(few.ranks_per_host, many.ranks_per_host), few.ranks)
    kinds = {
        (True, True): both,
        (True, False): within[0] - both,
        (False, True): within[1] - both,
    }
    kinds[False, False] = pairs - sum(kinds.values())
    for (in_few, in_many), number in kinds.items():
        if number > 0:
            cost += number * _edge_cost(_kind(few, in_few), _kind(many, in_many))
    return cost


def _kind(topology: RateTopology, within: bool) -> tuple[bool, float | None]:  # noqa: FBT001
    rate = topology.intra_bytes_per_s if within else topology.inter_bytes_per_s
    return within, rate


def _pairs_within(per_host: int, ranks: int) -> int:
    full, rest = divmod(ranks, per_host)
    return full * (per_host * (per_host - 1) // 2) + rest * (rest - 1) // 2
