"""Rates of simultaneous flows on the link they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost.collectives import collective_cost, wire_factor

if TYPE_CHECKING:
    from stretto.schema import Cluster


def gamma_at(gamma: tuple[float, ...], num_flows: int) -> float:
    r"""Return the slow-down $\gamma_k$ of each of $k$ = ``num_flows`` flows at once.

    Beyond the list $\gamma_k = \gamma_K k / K$ with $K$ its length, so the sum of the
    rates stays constant. Source: ASC-WFBP (INFOCOM 2021) Eq. 7-11 for $k = 2$.
    """
    known = len(gamma)
    if num_flows <= known:
        return gamma[num_flows - 1]
    return gamma[-1] * num_flows / known


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRates:
    r"""Rates of $k$ equal flows on one link, bytes/s on the wire.

    $x_k = \min(x_1 / \gamma_k,\; B / k)$

    with $x_1$ = ``alone_bytes_per_s``, $B$ = ``link_bytes_per_s`` and $\gamma_k = 1$
    without ``gamma``. Holds for flows that are past their start-up; a flow in start-up
    does not use the link.
    """

    alone_bytes_per_s: float

    link_bytes_per_s: float

    gamma: tuple[float, ...] = ()

    def limit_bytes_per_s(self, num_flows: int) -> float:
        """Return the rate of each of ``num_flows`` flows if the link had no limit."""
        if not self.gamma:
            return self.alone_bytes_per_s
        return self.alone_bytes_per_s / gamma_at(self.gamma, num_flows)

    def per_flow_bytes_per_s(self, num_flows: int) -> float:
        """Return the rate of each of ``num_flows`` flows."""
        share = self.link_bytes_per_s / num_flows
        return min(self.limit_bytes_per_s(num_flows), share)

    @property
    def limits_bytes_per_s(self) -> tuple[float, ...]:
        """Rate limit of 1, 2, ... flows by ``gamma`` alone; empty without it."""
        return tuple(self.alone_bytes_per_s / value for value in self.gamma)

    def best_total_bytes_per_s(
        self, flow_cap_bytes_per_s: float | None = None
    ) -> float:
        """Return the highest total rate that any number of flows reaches.

        ``flow_cap_bytes_per_s`` further limits each flow.
        """
        if not self.gamma:
            return self.link_bytes_per_s
        totals = [
            count * min(limit, flow_cap_bytes_per_s or limit)
            for count, limit in enumerate(self.limits_bytes_per_s, start=1)
        ]
        # Beyond the list the sum stays constant, and a per-flow cap no longer binds.
        totals.append(len(self.gamma) * self.limits_bytes_per_s[-1])
        return min(self.link_bytes_per_s, max(totals))


def flow_rates(cluster: Cluster) -> FlowRates:
    r"""Return how fast simultaneous all-reduces over all ranks send on the bottleneck.

    The figures of a cluster combine as follows:

    - The bottleneck link is ``inter_host``, or ``intra_host`` on a single host. The sum
      of the flows never exceeds its ``bandwidth_bytes_per_s``.
    - With a fitted ``allreduce``, one flow alone reaches
      $\rho(\mathrm{ranks\ of\ the\ fit})$ / ``allreduce.s_per_byte`` with $\rho$ the
      ring's `wire_factor`: a rate on the wire that holds for other numbers of ranks
      too. The fit replaces the link's ``stream_bytes_per_s`` and ``latency_s``. Without
      a fit, a flow reaches the link's ``stream_bytes_per_s``.
    - With ``concurrency``, each of $k$ flows reaches that rate divided by $\gamma_k$.
      Without it, each keeps the rate while the link suffices.
    - ``contention`` lowers a flow's own rate further (`curve_bytes_per_s`). The
      simulator applies it, because only it knows whether computation runs.
    """
    link = cluster.bottleneck
    alone_bytes_per_s = link.flow_bytes_per_s
    if cluster.allreduce is not None:
        fit = cluster.allreduce
        on_wire_bytes_per_s = wire_factor("ring", fit.ranks) / fit.s_per_byte
        alone_bytes_per_s = min(on_wire_bytes_per_s, link.bandwidth_bytes_per_s)
    return FlowRates(
        alone_bytes_per_s=alone_bytes_per_s,
        link_bytes_per_s=link.bandwidth_bytes_per_s,
        gamma=() if cluster.concurrency is None else cluster.concurrency.gamma,
    )


def all_reduce_s(
    size_bytes: int,
    cluster: Cluster,
    algorithm: str = "ring",
    *,
    part: str = "all_reduce",
) -> float:
    """Return the time of one all-reduce over all ranks that runs alone.

    No computation runs beside it, and `Contention` does not apply. A ring over the
    fit's number of ranks takes the fit's time, unless the fit is faster than the link.
    ``part`` selects one half, as in `collective_cost`.
    """
    cost = collective_cost(cluster, algorithm, part=part)
    alone_bytes_per_s = flow_rates(cluster).per_flow_bytes_per_s(1)
    wire_bytes = cost.wire_factor * size_bytes
    return cost.startup_of(size_bytes) + wire_bytes / alone_bytes_per_s
