"""Fit the coefficients of a `Cluster` to measured all-reduce times."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stretto.cost.collectives import interpolated
from stretto.cost.concurrency import gamma_at
from stretto.cost.piecewise import fit_piecewise
from stretto.cost.regression import standard_errors
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.schema import (
    AllReduceFit,
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    ExtraStartup,
    Link,
    RateCurve,
)
from stretto.units import counted, format_bytes, format_rate, format_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stretto.schema import CollectiveSample, ContentionSample

SMALL_BYTES = 64 * 1024
"""Smaller messages follow another line (other segments, no pacing yet), so error
summaries leave them out."""

_STARTUP_BYTES = 32 * 1024  # messages dominated by their start-up
_FULL_WEIGHT_BYTES = 1024 * 1024
_MIN_WEIGHT = 0.02
_SAME = 0.05  # a flow within this share of the link is not capped
_SLACK = 0.15  # tolerance for measured times that contradict physics
_MAX_ERROR = 0.35  # a median relative residual above this raises NoisyProfile
_SIGMA_FLOOR = 0.05


def fit_cluster(
    samples: Iterable[CollectiveSample],
    *,
    name: str,
    hosts: int,
    ranks_per_host: int = 1,
    contention_samples: Iterable[ContentionSample] = (),
    provenance: Mapping[str, Any] | None = None,
    by_size: bool = False,
) -> Cluster:
    r"""Fit the cluster whose model comes closest to measured all-reduce times.

    $T_k(m) = a + \max(a' (k - 1) + \rho m / c,\;
    \epsilon_k \rho m / \min(c,\, B/k))$

    is the time of $k$ simultaneous all-reduces of $m$ bytes each: $a$ the start-up of
    one, $a'$ the delay of every further start, $c$ the rate of one flow, $B$ that of
    the link, which the flows that started first can fill, both on the wire,
    $\rho = 2(N-1)/N$ the ring's factor at $N$ ranks, $\epsilon_k \ge 1$ the further
    slow-down of $k$ lanes. $a'$ comes from messages of at most 32 KiB; it is 0 if none
    of them was sent on several lanes.
    $a, c, B$ minimize the robust (soft L1) sum of $\log$ (predicted / measured),
    weighted by $m$ up to 1 MiB. Then
    $\gamma_k = \epsilon_k \max(1, kc/B)$, with $\epsilon$ interpolated between measured
    $k$. All are positive by construction and every $k / (\gamma_k b) \le$ link
    (`check_capacity`).

    With ``by_size`` the result's ``allreduce.extra`` holds how far a piecewise fit of
    the single-lane times departs from the line, for planners and the simulator.

    If no number of lanes saturates the link, $B$ is the rate that the most lanes
    reached, ``provenance["fit"]["link_reached"]`` is false, and the true link may be
    faster. A flow within 5 % of the link counts as not capped (``stream_bytes_per_s``
    null).

    ``provenance["fit"]`` of the result keeps each sample with its prediction. Its
    ``uncertainty_ratio`` gives the uncertainty of the start-up and the two rates, and
    ``piecewise`` two or three lines where small messages need their own.

    Raises:
        SpecError: too few samples, or samples of differing numbers of ranks.
        Infeasible: no network can explain the times; the message says which conflict.
        NoisyProfile: the model misses the samples by more than a third in the median.
    """
    rows = sorted(samples, key=lambda s: (s.lanes, s.size_bytes))
    ranks = _check(rows, hosts * ranks_per_host)
    rho = 2 * (ranks - 1) / ranks
    rates = _fit_rates(rows, rho)
    startup_s = rates.startup_s
    flow, link, reached = _flow_and_link(rates, widest=rows[-1].lanes)
    gamma = _fit_gamma(rows, rho, startup_s, rates.per_lane_s, flow, link)
    beyond = Concurrency(gamma=gamma, startup_per_lane_s=rates.per_lane_s)
    all_reduce = AllReduceFit(startup_s=startup_s, s_per_byte=rho / flow, ranks=ranks)
    wire = Link(
        latency_s=startup_s / (2 * (ranks - 1)),
        bandwidth_bytes_per_s=link,
        stream_bytes_per_s=flow if flow < link else None,
    )
    if by_size:
        all_reduce = replace(all_reduce, extra=_extra(rows, all_reduce))
    residuals = [
        _residual(s, predict_s(s.size_bytes, s.lanes, all_reduce, beyond)) for s in rows
    ]
    median_error, worst_error = _checked_errors(residuals)
    beside = _of_ranks(contention_samples, ranks)
    fitted = {
        "model": "startup + max(startup_per_lane * (lanes - 1) + wire_factor * bytes "
        "/ flow, wire_factor * bytes / min(flow, link / lanes) * epsilon)",
        "link_reached": reached,
        "flow_bytes_per_s": flow,
        "uncertainty_ratio": rates.uncertainty,
        "median_error": median_error,
        "worst_error": worst_error,
        "residuals": residuals,
        "piecewise": _piecewise(rows),
        "contention": [_contention_row(s) for s in beside],
    }
    cluster = Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        inter_host=wire,
        intra_host=wire,
        allreduce=all_reduce,
        concurrency=beyond,
        contention=_fit_lane_contention(beside, all_reduce, beyond, link),
        provenance={**(provenance or {}), "fit": fitted},
    )
    check_capacity(cluster)
    return cluster


def _flow_and_link(rates: _Rates, *, widest: int) -> tuple[float, float, bool]:
    """Return the rates of a flow and of the link, and whether lanes saturated it.

    Both are equal where a flow is not capped.
    """
    flow, link = rates.flow, rates.link
    reached = (1 - _SAME) * widest * flow > link
    if not reached:
        link = widest * flow
    if flow < (1 - _SAME) * link:
        return flow, link, reached
    return max(flow, link), max(flow, link), reached


def _checked_errors(residuals: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the median and the largest error, small messages apart.

    Raises:
        NoisyProfile: the median is too large.
    """
    errors = [abs(r["error"]) for r in residuals if r["size_bytes"] >= SMALL_BYTES]
    median = statistics.median(errors or [abs(r["error"]) for r in residuals])
    if median > _MAX_ERROR:
        raise NoisyProfile(
            f"no start-up and bandwidths explain the measured all-reduce times: the "
            f"best fit misses them by {100 * median:.0f} % in the median. Measure "
            "again on a quiet network, with more repetitions"
        )
    return median, max(errors or [0.0])


def _of_ranks(
    samples: Iterable[ContentionSample], ranks: int
) -> list[ContentionSample]:
    """Return samples by number of lanes.

    Raises:
        SpecError: one is of another number of ranks.
    """
    rows = sorted(samples, key=lambda s: s.lanes)
    for sample in rows:
        if sample.ranks != ranks:
            raise SpecError(
                f"contention samples must be of {ranks} ranks like the others, "
                f"got {sample.ranks}"
            )
    return rows


def predict_s(
    size_bytes: int, lanes: int, fit: AllReduceFit, beyond: Concurrency
) -> float:
    r"""Return the time of ``lanes`` simultaneous all-reduces of ``size_bytes`` each.

    $T = a + \max(a' (k - 1) + b m,\; \gamma_k b m)$; beyond the list $\gamma$ grows in
    proportion to $k$.
    """
    extra_s = interpolated([(p.bytes, p.extra_s) for p in fit.extra], size_bytes)
    alone_s = fit.s_per_byte * size_bytes
    last_s = beyond.startup_per_lane_s * (lanes - 1) + alone_s
    sending_s = max(last_s, gamma_at(beyond.gamma, lanes) * alone_s)
    return fit.startup_s + extra_s + sending_s


def check_capacity(cluster: Cluster) -> None:
    r"""Require that simultaneous all-reduces never exceed the link.

    $k \rho / (\gamma_k b) \le B$ for every $k$ of the list. Published coefficients
    violate this (ASC-WFBP's $\gamma_2 = 1.5$ asks for 1.33 times the link).

    Raises:
        Infeasible: naming the number of lanes, their total rate, and the link's rate.
    """
    fit = cluster.allreduce
    if fit is None:
        return
    link = cluster.bottleneck.bandwidth_bytes_per_s
    alone = 2 * (fit.ranks - 1) / fit.ranks / fit.s_per_byte
    gamma = cluster.concurrency.gamma if cluster.concurrency else (1.0,)
    for k, value in enumerate(gamma, start=1):
        total = k * alone / value
        if total > link * (1 + 1e-6):
            raise Infeasible(
                f"{counted(k, 'all-reduce')} at once would send "
                f"{format_rate(total)} over a link of {format_rate(link)} in cluster "
                f"{cluster.name!r}: gamma[{k - 1}] must be at least "
                f"{k * alone / link:.4g}, got {value:.4g}. Measure the network again "
                "(`stretto probe`)"
            )


def _extra(
    rows: Sequence[CollectiveSample], line: AllReduceFit
) -> tuple[ExtraStartup, ...]:
    """Return how far a fit of two or three lines departs from the single line."""
    alone = [s for s in rows if s.lanes == 1]
    try:
        curve = fit_piecewise(alone).value
    except Infeasible:  # too noisy for several lines
        return ()
    if len(curve.segments) == 1:
        return ()
    sizes = [s.size_bytes for s in alone]
    return curve.extra(line.startup_s, line.s_per_byte, sizes)


def _piecewise(rows: Sequence[CollectiveSample]) -> dict[str, Any] | None:
    """Return a fit of several lines if one line does not suffice, else ``None``.

    Large messages decide the one line of `AllReduceFit`; this describes small ones and
    the quality of their fit.
    """
    try:
        fit = fit_piecewise(s for s in rows if s.lanes == 1)
    except Infeasible:  # too noisy for several lines
        return None
    if len(fit.value.segments) == 1:
        return None
    return {
        "mean_error": fit.mean_error_ratio,
        "worst_error": fit.worst_error_ratio,
        "segments": [
            {
                "from_bytes": segment.from_bytes,
                "startup_s": segment.startup_s,
                "s_per_byte": segment.s_per_byte,
            }
            for segment in fit.value.segments
        ],
    }


def _check(rows: Sequence[CollectiveSample], ranks: int) -> int:
    alone = [s for s in rows if s.lanes == 1]
    if len({s.size_bytes for s in alone}) < 2:
        raise SpecError(
            "a fit needs samples of at least two sizes on one lane, got "
            f"{len({s.size_bytes for s in alone})}; give the probe a larger budget"
        )
    if ranks < 2:
        raise SpecError(f"hosts * ranks_per_host must be at least 2, got {ranks}")
    for sample in rows:
        if sample.ranks != ranks:
            raise SpecError(
                f"every sample must be of {ranks} ranks (hosts * ranks_per_host), "
                f"got one of {sample.ranks}"
            )
    small, large = alone[0], alone[-1]
    if large.duration_s <= small.duration_s:
        raise Infeasible(
            f"an all-reduce of {format_bytes(large.size_bytes)} took "
            f"{format_s(large.duration_s)}, one of {format_bytes(small.size_bytes)} "
            f"{format_s(small.duration_s)}: times that do not grow with the size give "
            "no bandwidth. Measure larger messages"
        )
    by_size = {(s.size_bytes, s.lanes): s.duration_s for s in rows}
    for (size_bytes, lanes), duration_s in by_size.items():
        alone_s = by_size.get((size_bytes, 1), 0.0)
        if size_bytes >= 16 * SMALL_BYTES and duration_s < (1 - 2 * _SLACK) * alone_s:
            raise Infeasible(
                f"{lanes} all-reduces of {format_bytes(size_bytes)} at once took "
                f"{format_s(duration_s)}, one alone {format_s(alone_s)}: more at once "
                "cannot be faster. Measure again on a quiet network"
            )
    return ranks


@dataclass(frozen=True, slots=True)
class _Rates:
    """Figures fitted to large messages, and the uncertainty of each."""

    startup_s: float
    flow: float
    link: float
    per_lane_s: float
    uncertainty: dict[str, float | None]


def _startup_per_lane_s(
    rows: Sequence[CollectiveSample], rho: float, found: _Rates
) -> float:
    """Return how much later every further lane starts, from small messages.

    Large messages, whose rates are fitted too, would attribute any slow-down to it.
    """
    small = {
        (s.size_bytes, s.lanes): s.duration_s
        for s in rows
        if s.size_bytes <= _STARTUP_BYTES
    }
    added_s = []
    for (size_bytes, lanes), duration_s in small.items():
        if lanes > 1 and (size_bytes, 1) in small:
            shared = max(0.0, lanes / found.link - 1 / found.flow)
            later_s = duration_s - small[size_bytes, 1] - rho * size_bytes * shared
            added_s.append(later_s / (lanes - 1))
    return max(0.0, statistics.median(added_s)) if added_s else 0.0


def _fit_rates(rows: Sequence[CollectiveSample], rho: float) -> _Rates:
    """Fit the start-up, the rate of a flow and that of the link."""
    largest = max((s for s in rows if s.lanes == 1), key=lambda s: s.size_bytes)
    flow = rho * largest.size_bytes / largest.duration_s
    link = max(rho * s.size_bytes * s.lanes / s.duration_s for s in rows)
    startup_s = min(s.duration_s for s in rows)
    starts = [
        (start * startup_s, flow, max(wide * link, flow))
        for start, wide in ((0.1, 1.0), (0.5, 1.3), (1.0, 1.0))
    ]
    found = _least_squares(rows, rho, starts, 0.0)
    per_lane_s = _startup_per_lane_s(rows, rho, found)
    if not per_lane_s:
        return found
    again = (found.startup_s, found.flow, found.link)
    return _least_squares(rows, rho, [again], per_lane_s)


def _least_squares(
    rows: Sequence[CollectiveSample],
    rho: float,
    starts: Iterable[tuple[float, float, float]],
    per_lane_s: float,
) -> _Rates:
    # Imported here so that reading a cluster file does not load SciPy.
    import numpy as np
    from scipy.optimize import least_squares

    size = np.array([s.size_bytes for s in rows], dtype=float)
    lanes = np.array([s.lanes for s in rows], dtype=float)
    measured_s = np.array([s.duration_s for s in rows])
    # Shaper bursts and socket buffers absorb part of a small message, and small
    # messages contribute little to a step's time.
    weight = np.clip(size / _FULL_WEIGHT_BYTES, _MIN_WEIGHT, 1.0)

    def times_s(x: Any) -> Any:
        startup_s, flow, link = np.exp(x)
        last_s = per_lane_s * (lanes - 1) + rho * size / np.minimum(flow, link)
        return startup_s + np.maximum(last_s, rho * size * lanes / link)

    def residuals(x: Any) -> Any:
        return weight * np.log(times_s(x) / measured_s)

    low = [math.log(1e-9), -10.0, -10.0]
    high = [math.log(max(float(np.max(measured_s)), 1e-8)), 40.0, 40.0]
    best: Any = None
    for start in starts:
        guess = np.clip(np.log(start), low, high)
        fit = least_squares(
            residuals, guess, bounds=(low, high), loss="soft_l1", f_scale=0.03
        )
        if best is None or fit.cost < best.cost:
            best = fit
    startup_s, flow, link = (float(v) for v in np.exp(best.x))
    errors = standard_errors(best.jac, best.fun)
    # Fit logarithms, so that errors are relative.
    uncertainty = {
        name: error if math.isfinite(error) else None
        for name, error in zip(("startup", "flow", "link"), errors, strict=True)
    }
    # The samples cannot distinguish a flow faster than the link from one that fills it.
    return _Rates(startup_s, min(flow, link), link, per_lane_s, uncertainty)


def _fit_gamma(
    rows: Sequence[CollectiveSample],
    rho: float,
    startup_s: float,
    per_lane_s: float,
    flow: float,
    link: float,
) -> tuple[float, ...]:
    widest = max(s.lanes for s in rows)
    measured: dict[int, float] = {1: 1.0}
    for lanes in sorted({s.lanes for s in rows if s.lanes > 1}):
        ideal = rho / min(flow, link / lanes)
        ratios, weights = [], []
        starting_s = startup_s
        if lanes * flow < link:
            starting_s += per_lane_s * (lanes - 1)
        for s in rows:
            if s.lanes == lanes and s.size_bytes >= SMALL_BYTES:
                sending_s = ideal * s.size_bytes
                ratios.append((s.duration_s - starting_s) / sending_s)
                # Times that are mostly start-up hold little information on the rate.
                weights.append(min(1.0, s.size_bytes / (4 * _FULL_WEIGHT_BYTES)))
        if ratios:
            measured[lanes] = max(1.0, _weighted_median(ratios, weights))
    known = sorted(measured)
    gamma: list[float] = []
    for lanes in range(1, widest + 1):
        left = max(k for k in known if k <= lanes)
        right = min((k for k in known if k >= lanes), default=left)
        part = (lanes - left) / (right - left) if right > left else 0.0
        excess = measured[left] * (1 - part) + measured[right] * part
        value = excess * max(1.0, lanes * flow / link)
        gamma.append(max(value, gamma[-1] if gamma else 1.0))
    return tuple(gamma)


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    passed = 0.0
    for value, weight in pairs:
        passed += weight
        if passed >= half:
            return value
    return pairs[-1][0]


def _fit_lane_contention(
    samples: Sequence[ContentionSample],
    all_reduce: AllReduceFit,
    beyond: Concurrency,
    link: float,
) -> Contention | None:
    r"""Fit how computation and all-reduces slow each other, over the useful lanes.

    $\sigma_k = 1 - \alpha_2 k$ by least squares through 1. One flow's rate $x$ beside
    computation is the one for which $a + \rho m / \min(x, c / \gamma_k)$ comes closest,
    in least squares of logarithms, to the fitted time of $k$ all-reduces times their
    measured slow-down. Lanes beyond what the link can feed carry no more bytes and are
    left out.
    """
    if not samples:
        return None
    gamma = beyond.gamma
    rho = 2 * (all_reduce.ranks - 1) / all_reduce.ranks
    flow = rho / all_reduce.s_per_byte
    feeds = math.ceil((1 - _SAME) * link / flow)
    useful = [s for s in samples if s.lanes <= min(feeds, len(gamma))] or [samples[0]]
    lost = sum(
        s.lanes * (1 - s.compute_alone_s / s.compute_overlapped_s) for s in useful
    )
    widest = max(s.lanes for s in useful)
    alpha2 = max(0.0, lost / sum(s.lanes**2 for s in useful))
    alpha2 = min(alpha2, (1 - _SIGMA_FLOOR) / widest)

    def miss(rate: float) -> float:
        total = 0.0
        for s in useful:
            alone_s = predict_s(s.size_bytes, s.lanes, all_reduce, beyond)
            slower = max(1.0, s.duration_overlapped_s / s.duration_alone_s)
            sending_s = rho * s.size_bytes / min(rate, flow / gamma[s.lanes - 1])
            ratio = (all_reduce.startup_s + sending_s) / (alone_s * slower)
            total += math.log(ratio) ** 2
        return total

    # From 1 % of the flow's rate up to all of it, in steps of 1 %; ties: the fastest.
    steps = math.ceil(math.log(100) / 0.01)
    rates = [flow * math.exp(-0.01 * i) for i in range(steps + 1)]
    return Contention(
        compute=ComputeContention(alpha1=1.0, alpha2=alpha2),
        overlapped=constant_rate(min(rates, key=miss)),
        exclusive=constant_rate(flow),
        resources=(1,),
    )


def slowed_by_lanes(alpha2: float, *, bytes_per_s: float) -> Contention:
    """Return a contention in which each busy lane slows computation by ``alpha2``.

    Flows have one rate, beside computation and alone.
    """
    rate = constant_rate(bytes_per_s)
    return Contention(
        compute=ComputeContention(alpha1=1.0, alpha2=alpha2),
        overlapped=rate,
        exclusive=rate,
        resources=(1,),
    )


def constant_rate(bytes_per_s: float) -> RateCurve:
    """Return a curve with the same rate at every resource, bytes/s."""
    return RateCurve(gamma1=bytes_per_s, gamma2=0.0, gamma3=0.0, gamma4=0.0)


def _residual(sample: CollectiveSample, predicted_s: float) -> dict[str, Any]:
    return {
        "size_bytes": sample.size_bytes,
        "lanes": sample.lanes,
        "measured_s": sample.duration_s,
        "spread_s": sample.spread_s,
        "repetitions": sample.repetitions,
        "predicted_s": predicted_s,
        "error": predicted_s / sample.duration_s - 1,
    }


def _contention_row(sample: ContentionSample) -> dict[str, Any]:
    return {
        "lanes": sample.lanes,
        "size_bytes": sample.size_bytes,
        "compute_slowdown": sample.compute_overlapped_s / sample.compute_alone_s,
        "collective_slowdown": sample.duration_overlapped_s / sample.duration_alone_s,
        "compute_alone_s": sample.compute_alone_s,
        "duration_alone_s": sample.duration_alone_s,
        "repetitions": sample.repetitions,
    }
