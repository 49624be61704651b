"""Lower bounds in closed form that no plan can beat whose step ends with its sends.

Called by `stretto.sim.scope` for a family of plans, by `stretto.sim.scaling`, and by
`stretto.sim.forward_bounds`, which has those of plans that send during the next
forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost import collective_cost, curve_bytes_per_s, flow_rates
from stretto.errors import SpecError
from stretto.sim.certificate import interval_bound_s, max_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Bounds on the step time of every plan, in seconds."""

    compute_s: float
    """Undisturbed computation."""

    cut_s: float
    """Best bound over all cuts of the tensors: late gradients are sent late."""

    link_s: float
    """All bytes at the link's full rate after the first gradient."""

    value_s: float
    """The largest of the bounds: no plan's step is shorter."""

    interval_s: float | None = None
    """By linear programming (`stretto.sim.certificate`), if it was requested."""


CERTIFICATES = ("fast", "lp")


def lower_bound(
    workload: Workload,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] = ("ring",),
    certificate: str = "fast",
    max_lanes: int | None = None,
) -> LowerBound:
    r"""Return bounds on `stretto.sim.simulate_step`'s step time over all plans.

    With forward $t_f$, backward $t_b$, gradient $l$ of $m_l$ bytes ready at $\tau_l$,
    least start-up $a$ and least wire factor $\rho$:

    - compute: $t_f + t_b$. Contention only slows computation.
    - cut: $\max_l t_f + \tau_l + a + \rho \sum_{j: \tau_j \ge \tau_l} m_j / X$. A
      bucket with one of these gradients starts no earlier than $\tau_l$ and pays a
      start-up. $X$ is the highest total rate of up to ``max_lanes`` flows: the link's
      bandwidth, or less if ``concurrency``, a flow's own limit or too few lanes keep
      their sum below it.
    - link: $t_f + \tau_1 + a + \rho \sum_j m_j / B$ with $B$ the link's bandwidth.

    - interval, with ``certificate`` = ``"lp"``: a linear program over intervals of
      computation, which bounds the cost of contention. It takes some 10 ms, and a third
      of a second once for loading SciPy. Without contention it equals cut.

    Lanes up to ``max_lanes`` (``None``: any number), slices, order and resources are
    free. Holds for plans whose buckets use ``algorithms``, overlap backward at most,
    and send the gradients in a type no narrower than their own.

    Raises:
        SpecError: the certificate is unknown.
    """
    if certificate not in CERTIFICATES:
        raise SpecError(
            f"certificate must be one of {', '.join(CERTIFICATES)}, got {certificate!r}"
        )
    compute_s = workload.forward_s + workload.backward_s
    sent = [tensor for tensor in workload.tensors if tensor.bytes]
    if cluster.ranks == 1 or not sent:
        return LowerBound(
            compute_s=compute_s, cut_s=compute_s, link_s=compute_s, value_s=compute_s
        )
    costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
    startup_s = min(cost.min_startup_s for cost in costs)
    factor = min(cost.wire_factor for cost in costs)
    bytes_per_s = best_bytes_per_s(cluster, max_lanes)
    cut_s = 0.0
    size_bytes = 0
    # Backward over the order of readiness: all tensors ready at or after each one.
    for tensor in reversed(sent):
        size_bytes += tensor.bytes
        cut_s = max(cut_s, tensor.ready_s + factor * size_bytes / bytes_per_s)
    cut_s += workload.forward_s + startup_s
    link_s = (
        workload.forward_s
        + sent[0].ready_s
        + startup_s
        + factor * size_bytes / flow_rates(cluster).link_bytes_per_s
    )
    interval_s = None
    if certificate == "lp":
        interval_s = interval_bound_s(
            workload, cluster, algorithms=algorithms, max_lanes=max_lanes
        )
    return LowerBound(
        compute_s=compute_s,
        cut_s=cut_s,
        link_s=link_s,
        value_s=max(compute_s, cut_s, link_s, interval_s or 0.0),
        interval_s=interval_s,
    )


def best_bytes_per_s(cluster: Cluster, max_lanes: int | None = None) -> float:
    """Return the highest total rate of up to ``max_lanes`` flows; ``None``: any."""
    flow_bytes_per_s = flow_rates(cluster).alone_bytes_per_s
    if (fastest := _fastest_flow(cluster)) is not None:
        flow_bytes_per_s = min(flow_bytes_per_s, fastest)
    return max_bytes_per_s(cluster, flow_bytes_per_s, max_lanes)


def _fastest_flow(cluster: Cluster) -> float | None:
    """Return a flow's highest rate under any resource, with or without computation."""
    contention = cluster.contention
    if contention is None:
        return None
    curves = (contention.overlapped, contention.exclusive)
    levels = contention.resources
    return max(curve_bytes_per_s(curve, r) for curve in curves for r in levels)
