"""Bound a step by linear programming, where sending and computing slow each other.

The closed forms of `stretto.sim.bounds` do not cover that trade-off.
Called by `stretto.sim.bounds`, which also limits rates by `max_bytes_per_s`.
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
_MAX_LANES = 32
"""Start-ups are counted up to this many lanes; with more, any number may overlap."""

_MAX_SETS = 20_000
_SAFETY = 1e-7
"""Relative error that a solver may leave; bounds are lowered by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingMode:
    """One combination of simultaneous computing and sending."""

    compute_rate: float

    bytes_per_s: float
    """Wire rate of all flows together."""

    startups: int = 0
    """Flows in their start-up at the same time."""


def working_modes(
    cluster: Cluster, max_lanes: int | None = None, *, startups: int = 0
) -> tuple[WorkingMode, ...]:
    """Return modes such that any flows beside computation are a mixture or worse.

    They form the upper hull of rates of computation and of sending. With ``max_lanes``
    they cover all sets of up to that many flows, ``startups`` of them sending nothing
    yet. Without it, any number of flows: their sum is at most the best rate per load
    times their load, and at most the link's bandwidth.
    """
    contention = cluster.contention
    rates = flow_rates(cluster)
    if contention is None:
        limit = max_bytes_per_s(
            cluster, rates.alone_bytes_per_s, _less(max_lanes, startups)
        )
        return tuple(
            WorkingMode(compute_rate=1.0, bytes_per_s=rate, startups=startups)
            for rate in dict.fromkeys((0.0, limit))
        )
    base = startups * contention.resources[0]
    points = [(compute_rate(contention.compute, base) if base else 1.0, 0.0)]
    if max_lanes is not None and _num_sets(contention, max_lanes) <= _MAX_SETS:
        caps = {
            r: _cap(cluster, contention.overlapped, r) for r in contention.resources
        }
        for count in range(1, max_lanes - startups + 1):
            limit = rates.limit_bytes_per_s(count)
            for chosen in combinations_with_replacement(contention.resources, count):
                total = sum(min(caps[r], limit) for r in chosen)
                speed = compute_rate(contention.compute, base + sum(chosen))
                points.append((speed, min(total, rates.link_bytes_per_s)))
    else:
        points += _unlimited_points(cluster, contention)
    return _upper_hull(points, startups)


def idle_bytes_per_s(cluster: Cluster, max_lanes: int | None = None) -> float:
    """Return the highest total rate of up to ``max_lanes`` flows after computation."""
    contention = cluster.contention
    cap = flow_rates(cluster).alone_bytes_per_s
    if contention is not None:
        cap = max(_cap(cluster, contention.exclusive, r) for r in contention.resources)
    return max_bytes_per_s(cluster, cap, max_lanes)


def max_bytes_per_s(cluster: Cluster, cap: float, max_lanes: int | None) -> float:
    """Return the highest total rate of up to ``max_lanes`` flows with a cap."""
    rates = flow_rates(cluster)
    if max_lanes is None:
        return rates.best_total_bytes_per_s(cap)
    # Beyond the list of ``gamma`` the sum never falls with the number of flows.
    counts = {*range(1, min(max_lanes, len(rates.gamma)) + 1), max(0, max_lanes)}
    sums = [k * min(cap, rates.limit_bytes_per_s(k)) for k in counts if k]
    return min(rates.link_bytes_per_s, max(sums, default=0.0))


def _less(max_lanes: int | None, startups: int) -> int | None:
    return None if max_lanes is None else max_lanes - startups


def interval_bound_s(
    workload: Workload,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] = ("ring",),
    max_lanes: int | None = None,
    intervals: int = INTERVALS,
) -> float:
    r"""Return a bound on the step time of every plan, from linear programs.

    The work from the first gradient on is cut into intervals at ready times. In
    interval $i$ of work $\Delta_i$, time $t_{im} \ge 0$ is spent in mode $m$, which
    computes at $\sigma_m$ and sends at $x_m$ (`working_modes`); the remaining bytes
    $y$ are sent after computation at the highest rate possible then, $X$:

    minimize $\sum t_{im} + y / X$ such that
    $\sum_m \sigma_m t_{im} = \Delta_i$;
    $\sum_{j \le i} \sum_m x_m t_{jm} \le$ bytes ready by the end of $i$, less those
    whose start-up cannot have ended; all bytes are sent; and for every $i$ the step
    ends no earlier than the beginning of $i$ plus a start-up plus the time of the bytes
    that become ready from there on.

    With ``max_lanes``, modes also include the number of flows in their start-up, and
    $k$ buckets need $k$ start-ups. Few buckets are large and wait for their last
    gradient, which bounds the step by `bucket_bound_s`. The bound is the least over $k$
    of the larger of the two: one falls with $k$, the other rises. Any number of lanes
    (``None``) allows any number of start-ups at once.

    Every plan of ``algorithms`` on at most ``max_lanes`` lanes that overlaps backward
    at most gives a feasible point, so the minimum is a bound. Solved by HiGHS.
    """
    sent = [tensor for tensor in workload.tensors if tensor.bytes]
    work_s = workload.forward_s + workload.backward_s
    if cluster.ranks == 1 or not sent:
        return work_s
    if max_lanes is not None and max_lanes > _MAX_LANES:
        max_lanes = None
    program = _Program(workload, cluster, algorithms, max_lanes, intervals)
    if max_lanes is None or not program.startup_s:
        return max(work_s, program.solved_s(1))
    few, many = 1, len(sent)
    # Invariant: below `few` there are too few buckets for the program to decide.
    while few < many:
        middle = (few + many) // 2
        if program.solved_s(middle) >= program.bucket_bound_s(middle):
            many = middle
        else:
            few = middle + 1
    bound_s = program.solved_s(few)
    bound_s = max(bound_s, program.bucket_bound_s(few))
    if few > 1:
        bound_s = min(bound_s, program.bucket_bound_s(few - 1))
    return max(work_s, bound_s)


class _Program:
    """The linear program of one workload, for any number of buckets."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        algorithms: Sequence[str],
        max_lanes: int | None,
        intervals: int,
    ) -> None:
        costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
        self.startup_s = min(cost.min_startup_s for cost in costs)
        factor = min(cost.wire_factor for cost in costs)
        self._max_lanes = max_lanes
        counting = max_lanes is not None and self.startup_s > 0
        numbers = range(max_lanes + 1) if max_lanes and counting else range(1)
        self._modes = [
            mode
            for number in numbers
            for mode in working_modes(cluster, max_lanes, startups=number)
        ]
        self._idle = [
            (idle_bytes_per_s(cluster, _less(max_lanes, number)), number)
            for number in numbers
        ]
        idle = self._idle[0][0]
        self._fastest = max(idle, *(mode.bytes_per_s for mode in self._modes))
        self._work_s = workload.forward_s + workload.backward_s
        sent = [tensor for tensor in workload.tensors if tensor.bytes]
        self._ready_s = [
            min(self._work_s, workload.forward_s + tensor.ready_s) for tensor in sent
        ]
        self._sizes = [factor * tensor.bytes for tensor in sent]
        self._edges = _edges(self._ready_s, self._sizes, self._work_s, intervals)
        slowest = _slowest_compute(cluster, max_lanes)
        self._available = [0.0] * (len(self._edges) - 1)
        self._later = [0.0] * len(self._edges)
        for at_s, size in zip(self._ready_s, self._sizes, strict=True):
            for i, edge_s in enumerate(self._edges):
                if i and at_s + slowest * self.startup_s < edge_s:
                    self._available[i - 1] += size
                if at_s >= edge_s:
                    self._later[i] += size
        self._flow = max(
            idle_bytes_per_s(cluster, 1),
            *(mode.bytes_per_s for mode in working_modes(cluster, 1)),
        )
        self._solved: dict[int, float] = {}

    def bucket_bound_s(self, buckets: int) -> float:
        r"""Return a time that no plan of at most ``buckets`` buckets can beat.

        With bucket $b$ ready at $\tau_b$, $M_b$ bytes in it and the $j - 1$ buckets
        after it: $T \ge \tau_b + \max(a + M_b / X, (j a + M_b / x) / K)$, because
        these start no earlier, and because $K$ lanes must send them, each at most at
        $x$. For a given $T$, buckets as large as this allows, from the last one on, are
        the fewest.
        """
        low, high = self._work_s, self._work_s + sum(self._sizes) / self._flow
        high += buckets * self.startup_s
        if self._fewest_buckets(low) <= buckets:
            return low
        for _ in range(40):
            middle = (low + high) / 2
            if self._fewest_buckets(middle) <= buckets:
                high = middle
            else:
                low = middle
        return low

    def _fewest_buckets(self, deadline_s: float) -> int:
        count, later, i = 0, 0.0, len(self._sizes)
        lanes = self._max_lanes or len(self._sizes)
        while i:
            count += 1
            spare_s = deadline_s - self._ready_s[i - 1]
            limit = min(
                (spare_s - self.startup_s) * self._fastest,
                (spare_s * lanes - count * self.startup_s) * self._flow,
            )
            if later + self._sizes[i - 1] > limit:
                return len(self._sizes) + 1  # no fusion meets the deadline
            while i and later + self._sizes[i - 1] <= limit:
                i -= 1
                later += self._sizes[i]
        return count

    def solved_s(self, buckets: int) -> float:
        """Return the program's minimum with at least ``buckets`` buckets."""
        if buckets not in self._solved:
            self._solved[buckets] = self._solve(buckets)
        return self._solved[buckets]

    def _solve(self, buckets: int) -> float:
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import lil_matrix

        edges, modes = self._edges, self._modes
        count, kinds, after = len(edges) - 1, len(modes), len(self._idle)
        scale = 1.0 / sum(self._sizes)
        rates = [mode.bytes_per_s * scale for mode in modes]
        # Variables: time in each mode of each interval, the end of computation, and
        # the step's end.
        num = count * kinds + after + 1
        tail, end = slice(count * kinds, num - 1), num - 1
        same = lil_matrix((count + 1, num))
        same_to = np.zeros(count + 1)
        upper = lil_matrix((2 * count + 3, num))
        upper_to = np.zeros(2 * count + 3)
        for i in range(count):
            span = slice(i * kinds, (i + 1) * kinds)
            same[i, span] = [mode.compute_rate for mode in modes]
            same_to[i] = edges[i + 1] - edges[i]
            for j in range(i, count):
                upper[j, span] = rates
            upper_to[i] = self._available[i] * scale
            upper[2 * count + 2, span] = [-mode.startups for mode in modes]
        same[count, : count * kinds] = rates * count
        same[count, tail] = [rate * scale for rate, _ in self._idle]
        same_to[count] = 1.0
        for i, edge_s in enumerate(edges):
            # first edge + time of the intervals before + start-up + what follows <= end
            row = count + i
            rate = self._idle[0][0] if edge_s >= self._work_s else self._fastest
            if i:
                upper[row, : i * kinds] = 1.0
            upper[row, end] = -1.0
            needed_s = self.startup_s + self._later[i] / rate if self._later[i] else 0.0
            upper_to[row] = -(edges[0] + needed_s)
        row = 2 * count + 1
        upper[row, : num - 1] = 1.0
        upper[row, end] = -1.0
        upper_to[row] = -edges[0]
        if after > 1:
            upper[row + 1, tail] = [-number for _, number in self._idle]
            upper_to[row + 1] = -buckets * self.startup_s
        goal = np.zeros(num)
        goal[end] = 1.0
        solved = linprog(
            goal,
            A_ub=upper.tocsr(),
            b_ub=upper_to,
            A_eq=same.tocsr(),
            b_eq=same_to,
            bounds=(0, None),
            method="highs",
        )
        return float(solved.fun) * (1.0 - _SAFETY) if solved.success else self._work_s


def _edges(
    ready_s: Sequence[float], sizes: Sequence[float], work_s: float, intervals: int
) -> list[float]:
    """Return ready times that cut the work into intervals of similar bytes and length.

    They extend from the first gradient to the end of work.
    """
    begin_s = ready_s[0]
    edges = [begin_s]
    total = sum(sizes)
    length_s = (work_s - begin_s) * 2 / intervals
    since = 0.0
    for at_s, size in zip(ready_s, sizes, strict=True):
        if at_s > edges[-1] and (
            since >= 2 * total / intervals or at_s - edges[-1] >= length_s
        ):
            edges.append(at_s)
            since = 0.0
        since += size
    if work_s > edges[-1]:
        edges.append(work_s)
    return edges


def _unlimited_points(
    cluster: Cluster, contention: Contention
) -> list[tuple[float, float]]:
    """Return corners of (compute rate, bytes per second) for any number of flows."""
    rates = flow_rates(cluster)
    caps = {r: _cap(cluster, contention.overlapped, r) for r in contention.resources}
    per_load = max(cap / r for r, cap in caps.items())
    limit = rates.best_total_bytes_per_s(max(caps.values()))
    compute = contention.compute
    loads = [float(contention.resources[0]), limit / per_load]
    if compute.alpha2 > 0:
        loads += [
            (compute.alpha1 - 1.0) / compute.alpha2,
            (compute.alpha1 - SIGMA_MIN) / compute.alpha2,
        ]
    loads = [max(load, loads[0]) for load in loads]
    return [
        (compute_rate(compute, load), min(limit, load * per_load)) for load in loads
    ]


def _upper_hull(
    points: Sequence[tuple[float, float]], startups: int
) -> tuple[WorkingMode, ...]:
    """Return points that no mixture of others beats, by falling compute rate."""
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
    return tuple(
        WorkingMode(compute_rate=s, bytes_per_s=r, startups=startups) for s, r in hull
    )


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


def _num_sets(contention: Contention, max_lanes: int) -> int:
    count = total = 1
    for k in range(1, max_lanes + 1):
        count = count * (len(contention.resources) + k - 1) // k
        total += count
    return total
