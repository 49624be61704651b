"""A fitted model corrected by what trials measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import least_squares

from stretto.cost import flow_rates
from stretto.cost.fit import constant_rate
from stretto.errors import SpecError
from stretto.schema import Cluster, ComputeContention, Contention, Plan, Workload
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stretto.schema import Timeline


PRIOR_RATIO = {
    "startup": 0.7,
    "flow": 0.4,
    "link": 0.6,
    "gamma": 0.25,
    "backward": 0.05,
    "outside": 0.1,
    "contention": 0.8,
}
"""How far each figure is likely to lie from its fit, as a ratio: the standard deviation
of its logarithm. Networks change under a job; its computation was measured in it, but
alone: what communication takes from it was not."""

UNSEEN_ALPHA2 = 0.05
"""Share of computation's rate that a busy lane takes, by which contention is counted
where none was measured: a factor of 2 then means so much."""

NOISE_RATIO = 0.02
"""The same for a measured step."""

RECORDED_RATIO = 0.03
"""The same for moments within one recorded step."""

_MOST_LOG = 1.5
_STEP_LOG = 0.05
_MOST_STEPS = 10

_POOR = 9.0
"""Sum of squares per observation, in units of the noise, that a good model keeps."""

_STARTS = ({"link": -0.7}, {"flow": -0.5}, {"link": 0.7}, {"flow": 0.5})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a plan's steps took."""

    plan: Plan

    step_s: float
    """Median of whole steps."""

    backward_s: float | None = None
    """Length of backward's computation beside communication, where it was recorded:
    what contention really costs."""

    bucket_ends_s: tuple[float, ...] = ()
    """When each bucket's last slice ended, from the start of backward, where that was
    recorded: what start-ups, flows and the link really do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A model and how it was changed."""

    workload: Workload

    cluster: Cluster

    factors: dict[str, float]
    """By figure, what it was multiplied by."""


def corrected(
    workload: Workload, cluster: Cluster, observations: Sequence[Observation]
) -> Correction:
    r"""The model that explains the observations with the least change.

    Factors $e^{\theta}$ on the start-up, the flow's and the link's rate, the excess of
    gamma over 1, backward's times, what lies outside it and what a busy lane takes from
    computation minimise

    $\sum_i (\log(T_i(\theta) / t_i) / \sigma)^2 + \sum_j (\theta_j / \sigma_j)^2$

    and the same of backward's length and of each recorded bucket's end, with
    `RECORDED_RATIO` and wider by the root of their number, $t_i$ the measured and $T_i$
    the simulated step of plan $i$, $\sigma$ `NOISE_RATIO` and $\sigma_j$
    `PRIOR_RATIO`: a ridge regression in logarithms, so a
    few observations move only what they speak about, and none moves nothing.

    Raises:
        SpecError: an observation's time is not positive.
    """
    for seen in observations:
        if not (math.isfinite(seen.step_s) and seen.step_s > 0):
            raise SpecError(f"step_s must be finite and > 0, got {seen.step_s}")
    names = list(PRIOR_RATIO)
    priors = np.array([PRIOR_RATIO[name] for name in names])
    if not observations:
        return Correction(
            workload=workload, cluster=cluster, factors=dict.fromkeys(names, 1.0)
        )

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(names, np.exp(theta), strict=True))
        changed, network = _scaled(workload, cluster, factors)
        rows = list(theta / priors)
        for seen in observations:
            rows += _misses(changed, network, seen)
        return np.array(rows)

    # The simulator has kinks: differences are taken over a wide step, and where the
    # search from the fit stays in one, it begins again from slower and faster networks.
    best = _least(residuals, np.zeros(len(names)))
    for at in _STARTS if 2 * best.cost > _POOR * len(observations) else ():
        start = np.array([at.get(name, 0.0) for name in names])
        best = min(best, _least(residuals, start), key=lambda found: found.cost)
    factors = {
        name: float(value) for name, value in zip(names, np.exp(best.x), strict=True)
    }
    changed, network = _scaled(workload, cluster, factors)
    return Correction(workload=changed, cluster=network, factors=factors)


def backward_s(timeline: Timeline) -> float | None:
    """Length of backward's computation in a timeline."""
    for span in timeline.spans:
        if span.track == "compute" and span.name == "backward":
            return span.end_s - span.start_s or None
    return None


def bucket_ends_s(timeline: Timeline) -> tuple[float, ...]:
    """When each bucket's last slice ended, from the start of backward."""
    start_s = math.inf
    ends_s: dict[int, float] = {}
    for span in timeline.spans:
        if span.track == "compute" and span.name == "backward":
            start_s = min(start_s, span.start_s)
        elif span.track.startswith("lane") and "bucket" in span.args:
            bucket = int(span.args["bucket"])
            ends_s[bucket] = max(ends_s.get(bucket, 0.0), span.end_s)
    if math.isinf(start_s) or sorted(ends_s) != list(range(len(ends_s))):
        return ()
    return tuple(ends_s[i] - start_s for i in range(len(ends_s)))


def _misses(workload: Workload, cluster: Cluster, seen: Observation) -> list[float]:
    """How far a model misses an observation, in units of the noise."""
    step = simulate_step(workload, cluster, seen.plan)
    rows = [math.log(step.iteration_s / seen.step_s) / NOISE_RATIO]
    computed_s = backward_s(step.timeline)
    if seen.backward_s is not None and computed_s is not None:
        rows.append(math.log(computed_s / seen.backward_s) / RECORDED_RATIO)
    if seen.bucket_ends_s:
        # Against the whole step: what lies early in it is seen least well.
        noise_s = RECORDED_RATIO * seen.step_s * math.sqrt(len(seen.bucket_ends_s))
        ends_s = bucket_ends_s(step.timeline)
        rows += [
            (predicted_s - end_s) / noise_s
            for predicted_s, end_s in zip(ends_s, seen.bucket_ends_s, strict=False)
        ]
    return rows


def _least(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    start: NDArray[np.float64],
) -> Any:
    return least_squares(
        residuals,
        start,
        bounds=(-_MOST_LOG, _MOST_LOG),
        # Relative to theta in SciPy; an absolute step keeps sense at 0.
        jac=partial(_slopes, residuals),
        max_nfev=_MOST_STEPS,
    )


def _slopes(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    theta: NDArray[np.float64],
) -> NDArray[np.float64]:
    here = residuals(theta)
    columns = []
    for i in range(len(theta)):
        step = np.zeros(len(theta))
        # Towards the inside of the bounds.
        step[i] = -_STEP_LOG if theta[i] > 0 else _STEP_LOG
        columns.append((residuals(theta + step) - here) / step[i])
    return np.stack(columns, axis=1)


def _scaled(
    workload: Workload, cluster: Cluster, factors: dict[str, float]
) -> tuple[Workload, Cluster]:
    return _slower(workload, factors["backward"], factors["outside"]), _rewired(
        cluster, factors
    )


def _slower(workload: Workload, backward: float, outside: float) -> Workload:
    return replace(
        workload,
        forward_s=workload.forward_s * outside,
        backward_s=workload.backward_s * backward,
        tensors=tuple(
            replace(
                tensor,
                ready_s=tensor.ready_s * backward,
                needed_s=tensor.needed_s * outside,
            )
            for tensor in workload.tensors
        ),
    )


def _rewired(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    wire = cluster.bottleneck
    rates = flow_rates(cluster)
    alone, link = rates.alone_bytes_per_s, rates.link_bytes_per_s
    capped = alone < link
    new_link = link * factors["link"]
    new_alone = min(alone * factors["flow"], new_link) if capped else new_link
    wire = replace(
        wire,
        latency_s=wire.latency_s * factors["startup"],
        bandwidth_bytes_per_s=new_link,
        stream_bytes_per_s=None if wire.stream_bytes_per_s is None else new_alone,
    )
    fit, concurrency = cluster.allreduce, cluster.concurrency
    if fit is not None:
        fit = replace(
            fit,
            startup_s=fit.startup_s * factors["startup"],
            s_per_byte=fit.s_per_byte * alone / new_alone,
        )
    if concurrency is not None:
        # gamma_k is what sharing the link costs times what lanes cost beyond that.
        gamma = [1.0]
        for k, value in enumerate(concurrency.gamma[1:], start=2):
            excess = max(1.0, value / max(1.0, k * alone / link))
            excess = 1.0 + (excess - 1.0) * factors["gamma"]
            gamma.append(max(gamma[-1], excess * max(1.0, k * new_alone / new_link)))
        concurrency = replace(concurrency, gamma=tuple(gamma))
    between = cluster.hosts > 1
    return replace(
        cluster,
        inter_host=wire if between else cluster.inter_host,
        intra_host=cluster.intra_host if between else wire,
        allreduce=fit,
        concurrency=concurrency,
        contention=_contention(cluster, factors["contention"], new_link),
    )


def _contention(cluster: Cluster, factor: float, link: float) -> Contention | None:
    """Contention of computation, more or less than was measured."""
    seen = cluster.contention
    if seen is not None and seen.compute.alpha2 > 0:
        alpha2 = seen.compute.alpha2 * factor
        return replace(seen, compute=replace(seen.compute, alpha2=alpha2))
    alpha2 = UNSEEN_ALPHA2 * (factor - 1)
    if alpha2 <= 0:
        return seen
    compute = ComputeContention(alpha1=1.0, alpha2=alpha2)
    if seen is not None:
        return replace(seen, compute=compute)
    free = constant_rate(link)  # computation slows no flow, as far as is known
    return Contention(compute=compute, overlapped=free, exclusive=free, resources=(1,))
