"""Lower bounds by linear programming, where computation and communication slow each
other: the trade-off that the closed forms of `stretto.sim.bounds` leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from stretto.cost import (
    SIGMA_MIN,
    collective_cost,
    compute_rate,
    curve_bytes_per_s,
    flow_rates,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Contention, RateCurve, Workload

INTERVALS = 40
_MOST_SETS = 20_000
_SAFETY = 1e-7
"""Relative error that a solver may leave; bounds are lowered by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to compute and send at once."""

    compute_rate: float

    bytes_per_s: float
    """On the wire, of all flows together."""


def working_modes(cluster: Cluster, max_lanes: int | None = None) -> tuple[Mode, ...]:
    """The ways of which every set of flows beside computation is a mixture or worse.

    The upper hull of rates of computation and of sending. With ``max_lanes`` over all
    sets of up to so many flows; without, any number of flows: their sum is at most the
    best rate per load times their load, and at most what the link carries.
    """
    contention = cluster.contention
    rates = flow_rates(cluster)
    if contention is None:
        most = _most(cluster, rates.alone_bytes_per_s, max_lanes)
        return (Mode(compute_rate=1.0, bytes_per_s=most),)
    points = [(1.0, 0.0)]
    if max_lanes is not None and _num_sets(contention, max_lanes) <= _MOST_SETS:
        caps = {
            r: _cap(cluster, contention.overlapped, r) for r in contention.resources
        }
        for count in range(1, max_lanes + 1):
            limit = _flow_limit(cluster, count)
            for chosen in combinations_with_replacement(contention.resources, count):
                total = sum(min(caps[r], limit) for r in chosen)
                speed = compute_rate(contention.compute, sum(chosen))
                points.append((speed, min(total, rates.link_bytes_per_s)))
    else:
        points += _unlimited_points(cluster, contention)
    return _upper_hull(points)


def idle_bytes_per_s(cluster: Cluster, max_lanes: int | None = None) -> float:
    """The most that up to so many flows send together once computation has ended."""
    contention = cluster.contention
    cap = flow_rates(cluster).alone_bytes_per_s
    if contention is not None:
        cap = max(_cap(cluster, contention.exclusive, r) for r in contention.resources)
    return _most(cluster, cap, max_lanes)


def _most(cluster: Cluster, cap: float, max_lanes: int | None) -> float:
    """The most that up to so many flows of a cap reach together."""
    rates = flow_rates(cluster)
    if max_lanes is None:
        return rates.best_total_bytes_per_s(cap)
    return min(
        rates.link_bytes_per_s,
        max(k * min(cap, _flow_limit(cluster, k)) for k in range(1, max_lanes + 1)),
    )


def interval_bound_s(
    workload: Workload,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] = ("ring",),
    max_lanes: int | None = None,
    intervals: int = INTERVALS,
) -> float:
    r"""A bound on the iteration time of every plan, from a linear programme.

    The work from the first gradient on is cut into intervals at ready times. In
    interval $i$ of work $\Delta_i$ time $t_{im} \ge 0$ is spent in mode $m$, which
    computes at $\sigma_m$ and sends at $x_m$ (`working_modes`); what is left, $y$, is
    sent after computation at the most that is possible then, $X$:

    minimise $\sum t_{im} + y / X$ such that
    $\sum_m \sigma_m t_{im} = \Delta_i$;
    $\sum_{j \le i} \sum_m x_m t_{jm} \le$ bytes ready by the end of $i$, less those
    whose start-up can't have ended; all bytes are sent; and for every $i$ the step ends
    no earlier than the beginning of $i$ plus a start-up plus the time of the bytes that
    become ready from there on.

    Every plan of ``algorithms`` on at most ``max_lanes`` lanes (``None``: any number)
    that overlaps backward at most gives a feasible point, so the minimum is a bound. A
    start-up's own load is left out, which only lowers it. Solved by HiGHS.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import lil_matrix

    sent = [tensor for tensor in workload.tensors if tensor.bytes]
    work_s = workload.forward_s + workload.backward_s
    if cluster.ranks == 1 or not sent:
        return work_s
    costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
    startup_s = min(cost.startup_s for cost in costs)
    factor = min(cost.wire_factor for cost in costs)
    modes = working_modes(cluster, max_lanes)
    idle = idle_bytes_per_s(cluster, max_lanes)
    fastest = max(idle, *(mode.bytes_per_s for mode in modes))
    ready_s = [min(work_s, workload.forward_s + tensor.ready_s) for tensor in sent]
    edges = _edges(ready_s, [t.bytes for t in sent], work_s, intervals)
    if len(edges) < 2:
        # All gradients come with the end of work.
        total = factor * sum(tensor.bytes for tensor in sent)
        return work_s + startup_s + total / idle
    slowest = _slowest_compute(cluster, max_lanes)
    count, kinds = len(edges) - 1, len(modes)
    total = 0.0
    available = [0.0] * count
    later = [0.0] * (count + 1)
    for at_s, tensor in zip(ready_s, sent, strict=True):
        size = factor * tensor.bytes
        total += size
        for i in range(count):
            if at_s + slowest * startup_s < edges[i + 1]:
                available[i] += size
        for i in range(count + 1):
            if at_s >= edges[i]:
                later[i] += size
    # Variables: time in each mode of each interval, bytes left, the step's end.
    num = count * kinds + 2
    left, end = num - 2, num - 1
    scale = 1.0 / total
    same = lil_matrix((count + 1, num))
    same_to = np.zeros(count + 1)
    least = lil_matrix((2 * count + 2, num))
    least_to = np.zeros(2 * count + 2)
    for i in range(count):
        span = slice(i * kinds, (i + 1) * kinds)
        same[i, span] = [mode.compute_rate for mode in modes]
        same_to[i] = edges[i + 1] - edges[i]
        rates = [mode.bytes_per_s * scale for mode in modes]
        same[count, span] = rates
        for j in range(i, count):
            least[j, span] = rates
        least_to[i] = available[i] * scale
    same[count, left] = 1.0
    same_to[count] = 1.0
    for i in range(count + 1):
        # first edge + time of the intervals before + start-up + what follows <= end
        row = count + i
        rate = idle if edges[i] >= work_s else fastest
        least[row, : i * kinds] = 1.0
        least[row, end] = -1.0
        least_to[row] = -(edges[0] + startup_s + later[i] / rate)
        if not later[i]:
            least_to[row] = -edges[0]
    row = 2 * count + 1
    least[row, : count * kinds] = 1.0
    least[row, left] = total / idle
    least[row, end] = -1.0
    least_to[row] = -edges[0]
    goal = np.zeros(num)
    goal[end] = 1.0
    solved = linprog(
        goal,
        A_ub=least.tocsr(),
        b_ub=least_to,
        A_eq=same.tocsr(),
        b_eq=same_to,
        bounds=(0, None),
        method="highs",
    )
    if not solved.success:
        return work_s
    return max(work_s, float(solved.fun) * (1.0 - _SAFETY))


def _edges(
    ready_s: Sequence[float], sizes: Sequence[int], work_s: float, intervals: int
) -> list[float]:
    """Ready times that cut the work into intervals of like bytes and like length, from
    the first gradient to the end of work.
    """
    begin_s = ready_s[0]
    edges = [begin_s]
    total, seen = sum(sizes), 0
    length_s = (work_s - begin_s) * 2 / intervals
    since = 0
    for at_s, size in zip(ready_s, sizes, strict=True):
        if at_s > edges[-1] and (
            since >= 2 * total / intervals or at_s - edges[-1] >= length_s
        ):
            edges.append(at_s)
            since = 0
        seen += size
        since += size
    if work_s > edges[-1]:
        edges.append(work_s)
    return edges


def _unlimited_points(
    cluster: Cluster, contention: Contention
) -> list[tuple[float, float]]:
    """Corners of (rate of computation, bytes per second) for any number of flows."""
    rates = flow_rates(cluster)
    caps = {r: _cap(cluster, contention.overlapped, r) for r in contention.resources}
    per_load = max(cap / r for r, cap in caps.items())
    most = rates.best_total_bytes_per_s(max(caps.values()))
    compute = contention.compute
    loads = [float(contention.resources[0]), most / per_load]
    if compute.alpha2 > 0:
        loads += [
            (compute.alpha1 - 1.0) / compute.alpha2,
            (compute.alpha1 - SIGMA_MIN) / compute.alpha2,
        ]
    loads = [max(load, loads[0]) for load in loads]
    return [(compute_rate(compute, load), min(most, load * per_load)) for load in loads]


def _upper_hull(points: Sequence[tuple[float, float]]) -> tuple[Mode, ...]:
    """The points that no mixture of others beats, by falling rate of computation."""
    hull: list[tuple[float, float]] = []
    for speed, rate in sorted(points, key=lambda p: (-p[0], -p[1])):
        if hull and rate <= hull[-1][1]:
            continue
        while len(hull) >= 2 and (hull[-1][1] - hull[-2][1]) * (
            hull[-2][0] - speed
        ) <= (rate - hull[-2][1]) * (hull[-2][0] - hull[-1][0]):
            hull.pop()
        if hull and hull[-1][0] == speed:
            hull[-1] = (speed, rate)
        else:
            hull.append((speed, rate))
    return tuple(Mode(compute_rate=s, bytes_per_s=r) for s, r in hull)


def _slowest_compute(cluster: Cluster, max_lanes: int | None) -> float:
    if cluster.contention is None:
        return 1.0
    if max_lanes is None:
        return SIGMA_MIN
    load = max_lanes * cluster.contention.resources[-1]
    return compute_rate(cluster.contention.compute, load)


def _cap(cluster: Cluster, curve: RateCurve, resource: int) -> float:
    return min(
        flow_rates(cluster).alone_bytes_per_s, curve_bytes_per_s(curve, resource)
    )


def _flow_limit(cluster: Cluster, num_flows: int) -> float:
    """The most that each of some flows gets by ``gamma``; infinite without it."""
    limits = flow_rates(cluster).limits_bytes_per_s
    if not limits:
        return float("inf")
    if num_flows <= len(limits):
        return limits[num_flows - 1]
    return limits[-1] * len(limits) / num_flows


def _num_sets(contention: Contention, max_lanes: int) -> int:
    count = total = 1
    for k in range(1, max_lanes + 1):
        count = count * (len(contention.resources) + k - 1) // k
        total += count
    return total
