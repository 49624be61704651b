"""Correct a fitted model by the measured trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stretto.cost import flow_rates
from stretto.cost.fit import constant_rate
from stretto.errors import SpecError
from stretto.schema import Cluster, ComputeContention, Contention, Plan, Workload
from stretto.sim.replay import PlanModel
from stretto.sim.step import simulate_step
from stretto.tune.least import Least, least_squares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.schema import Timeline
    from stretto.tune.least import Vector


PRIOR_RATIO = {
    "startup": 0.7,
    "flow": 0.4,
    "link": 0.6,
    "gamma": 0.25,
    "backward": 0.05,
    "outside": 0.1,
    "contention": 0.8,
}
"""Likely distance of each figure from its fit, as a ratio: the standard deviation of
its logarithm. A network changes during a job. Computation was measured in the job, but
alone: its slowdown by communication was not measured."""

UNSEEN_ALPHA2 = 0.05
"""Share of computation's rate that a busy lane takes, assumed where contention was not
measured. The contention factor scales it: a factor of 2 adds this share."""

NOISE_RATIO = 0.02
"""Standard deviation of the logarithm of a measured step."""

RECORDED_RATIO = 0.03
"""Standard deviation of the logarithm of times within one recorded step."""

_MOST_LOG = 1.5
_MOST_STEPS = 8

_POOR = 5.0
"""Sum of squares per observation, in units of the noise, below which a fit is good."""

_STARTS = (
    {"link": -0.7},
    {"link": 0.7},
    {"flow": -0.5},
    {"flow": 0.5},
    {"contention": 1.6},
    {"contention": 1.0, "link": -0.5},
)
"""Logarithms of factors. A search that finds no good fit from factor 1 restarts from
the best of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The measured times of a plan's steps."""

    plan: Plan

    step_s: float
    """Median duration of whole steps."""

    backward_s: float | None = None
    """Duration of backward's computation alongside communication, where it was
    recorded. It shows the real cost of contention."""

    bucket_ends_s: tuple[float, ...] = ()
    """End of each bucket's last slice, from the start of backward, where it was
    recorded. It shows the real behavior of start-ups, flows and the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A corrected model and its factors."""

    workload: Workload

    cluster: Cluster

    factors: dict[str, float]
    """By figure, its multiplier."""


def corrected(
    workload: Workload, cluster: Cluster, observations: Sequence[Observation]
) -> Correction:
    r"""Return the model that explains the observations with the least change.

    Factors $e^{\theta}$ on the start-up, the flow's and the link's rate, the excess of
    gamma over 1, backward's times, the time outside backward and the share that a busy
    lane takes from computation minimize

    $\sum_i (\log(T_i(\theta) / t_i) / \sigma)^2 + \sum_j (\theta_j / \sigma_j)^2$

    and the same for backward's duration and each recorded bucket's end, with
    `RECORDED_RATIO`, wider by the square root of their number. Here $t_i$ is the
    measured and $T_i$ the simulated step of plan $i$, $\sigma$ is `NOISE_RATIO` and
    $\sigma_j$ `PRIOR_RATIO`. This is a ridge regression in logarithms: a few
    observations move only the figures that they depend on, and no observation moves
    nothing.

    Raises:
        SpecError: an observation's time is not positive.
    """
    for seen in observations:
        if not (math.isfinite(seen.step_s) and seen.step_s > 0):
            raise SpecError(f"step_s must be finite and > 0, got {seen.step_s}")
    names = list(PRIOR_RATIO)
    if not observations:
        return Correction(
            workload=workload, cluster=cluster, factors=dict.fromkeys(names, 1.0)
        )
    best = _best(_Misses(workload, cluster, observations), _free(cluster))
    factors = {
        name: float(value)
        for name, value in zip(names, np.exp(best.theta), strict=True)
    }
    changed, network = scaled(workload, cluster, factors)
    return Correction(workload=changed, cluster=network, factors=factors)


def scaled(
    workload: Workload, cluster: Cluster, factors: dict[str, float]
) -> tuple[Workload, Cluster]:
    """Return a model with each figure of `PRIOR_RATIO` multiplied by its factor."""
    return _slower(workload, factors["backward"], factors["outside"]), _rewired(
        cluster, factors
    )


def backward_s(timeline: Timeline) -> float | None:
    """Return the duration of backward's computation in a timeline."""
    for span in timeline.spans:
        if span.track == "compute" and span.name == "backward":
            return span.end_s - span.start_s or None
    return None


def bucket_ends_s(timeline: Timeline) -> tuple[float, ...]:
    """Return the end of each bucket's last slice, from the start of backward."""
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


def _free(cluster: Cluster) -> list[int]:
    """Return the indices of the figures that affect a cluster; the others stay 1."""
    rates = flow_rates(cluster)
    idle = set()
    if rates.alone_bytes_per_s >= rates.link_bytes_per_s:
        idle.add("flow")
    if cluster.concurrency is None:
        idle.add("gamma")
    return [i for i, name in enumerate(PRIOR_RATIO) if name not in idle]


def _best(misses: _Misses, free: Sequence[int]) -> Least:
    """Return the least sum of squares found.

    The model has kinks in which a search gets stuck. If the result from the fit is
    poor, the search restarts from the best of a few slower and faster networks.
    Evaluating all of these costs as much as one step of a search.
    """

    def search(begin: Least) -> Least:
        return least_squares(
            misses, begin, free=free, most=_MOST_LOG, steps=_MOST_STEPS
        )

    best = search(misses.at({}))
    if 2 * best.cost <= _POOR * misses.number:
        return best
    start = min(map(misses.at, _STARTS), key=lambda found: found.cost)
    return min(best, search(start), key=lambda found: found.cost)


class _Misses:
    """Residuals of a model against observations, in units of the noise."""

    def __init__(
        self, workload: Workload, cluster: Cluster, seen: Sequence[Observation]
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._priors = np.array(list(PRIOR_RATIO.values()))
        self._seen = [
            (
                one,
                PlanModel(workload, cluster, one.plan)
                if PlanModel.knows(one.plan)
                else None,
            )
            for one in seen
        ]
        self.number = len(seen)

    def at(self, logarithms: dict[str, float]) -> Least:
        """Return the residuals for some factors, given by their logarithms."""
        theta = np.array([logarithms.get(name, 0.0) for name in PRIOR_RATIO])
        return Least(theta=theta, rows=self(theta))

    def __call__(self, theta: Vector) -> Vector:
        factors = dict(zip(PRIOR_RATIO, np.exp(theta).tolist(), strict=True))
        network = _rewired(self._cluster, factors)
        rows = (theta / self._priors).tolist()
        for seen, model in self._seen:
            rows += self._of(seen, model, network, factors)
        return np.array(rows)

    def _of(
        self,
        seen: Observation,
        model: PlanModel | None,
        network: Cluster,
        factors: dict[str, float],
    ) -> Iterator[float]:
        """Yield the residuals of one observation."""
        computed_s: float | None
        if model is not None:
            times = model.times(network, pace=factors["backward"])
            computed_s, ends_s = times.computed_s or None, times.bucket_ends_s
            step_s = self._workload.forward_s * factors["outside"] + times.end_s
        else:
            paced = _slower(self._workload, factors["backward"], factors["outside"])
            step = simulate_step(paced, network, seen.plan)
            computed_s = backward_s(step.timeline)
            ends_s = bucket_ends_s(step.timeline)
            step_s = step.iteration_s
        yield math.log(step_s / seen.step_s) / NOISE_RATIO
        if seen.backward_s is not None and computed_s is not None:
            yield math.log(computed_s / seen.backward_s) / RECORDED_RATIO
        if seen.bucket_ends_s:
            # Relative to the whole step: early times are measured least precisely.
            noise_s = RECORDED_RATIO * seen.step_s * math.sqrt(len(seen.bucket_ends_s))
            for predicted_s, end_s in zip(ends_s, seen.bucket_ends_s, strict=False):
                yield (predicted_s - end_s) / noise_s


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
        startup = factors["startup"]
        # The extra start-up of a size scales with it: it is never less than -startup_s.
        extra = [replace(point, extra_s=point.extra_s * startup) for point in fit.extra]
        fit = replace(
            fit,
            startup_s=fit.startup_s * startup,
            extra=tuple(extra),
            s_per_byte=fit.s_per_byte * alone / new_alone,
        )
    if concurrency is not None:
        # gamma_k is the cost of sharing the link times the extra cost of lanes.
        gamma = [1.0]
        for k, value in enumerate(concurrency.gamma[1:], start=2):
            excess = max(1.0, value / max(1.0, k * alone / link))
            excess = 1.0 + (excess - 1.0) * factors["gamma"]
            gamma.append(max(gamma[-1], excess * max(1.0, k * new_alone / new_link)))
        concurrency = replace(
            concurrency,
            gamma=tuple(gamma),
            startup_per_lane_s=concurrency.startup_per_lane_s * factors["startup"],
        )
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
    """Return contention of computation, scaled from its measured value."""
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
    free = constant_rate(link)  # no evidence that computation slows a flow
    return Contention(compute=compute, overlapped=free, exclusive=free, resources=(1,))
