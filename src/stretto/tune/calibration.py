"""Guide a search with a model that measured trials correct.

`CalibratedModel` predicts step times and bounds for the search. `corrected` fits the
model's figures to the trials (`least_squares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np

from stretto import planners
from stretto.cost import flow_rates
from stretto.cost.fit import slowed_by_lanes
from stretto.errors import Infeasible, SpecError
from stretto.planners.aiacc import MAX_LANES
from stretto.planners.base import predicted_s
from stretto.planners.wire import narrowed
from stretto.schema import Cluster, ComputeContention, Contention, Plan, Workload
from stretto.sim.replay import can_replay, prepared
from stretto.sim.scope import BoundScope
from stretto.sim.step import simulate_step
from stretto.sim.step_model import StepModel
from stretto.tune.forward_plans import forward_options
from stretto.tune.search_space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from stretto.schema import Timeline
    from stretto.sim.replay import PreparedPlan
    from stretto.tune.search_space import Point

    Vector = NDArray[np.float64]

TRUSTED_RATIO = 0.03
"""A prediction within this ratio of the measurement corrects nothing."""

DOUBT_RATIO = 0.03
"""Smallest error assumed of a prediction when a plan is ruled out without a trial."""

MAX_BOUND_DOUBT_RATIO = 0.10
"""Largest share by which the bound is lowered; a model further off says little."""

_MAX_OBSERVATIONS = 4


@final
class CalibratedModel:
    """The current workload and cluster estimates, and predictions from them."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        planner: str = "joint",
        wire_dtype: str | None = None,
        max_lanes: int = MAX_LANES,
        forward: bool = False,
    ) -> None:
        """Initialize; with ``forward`` plans may overlap with the next forward."""
        self.workload = workload
        self.cluster = cluster
        self.factors: dict[str, float] = {}
        """By figure, the multiplier from corrections; empty before the first."""
        self._first = (workload, cluster)
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._max_lanes = max_lanes
        self._options = forward_options(planner) if forward else {}
        self._observations: list[Observation] = []
        self._replanned: tuple[Plan, ...] = ()
        self.doubt_ratio = 0.0
        """The largest prediction error so far, each taken before its own trial.
        Agreement among trials that are near each other says little about distant plans.
        """
        sent = workload if wire_dtype is None else narrowed(workload, wire_dtype)
        self.space = Space(sent, max_lanes=max_lanes)
        self._model = self._prepared()
        self._first_bound_s = self._bound_s()

    def plan_of(self, point: Point) -> Plan:
        """Return the plan for a point of the space, predicted by the current model."""
        plan = self.space.plan(point, self.cluster)
        if self._wire_dtype is not None:
            plan = replace(plan, workload_digest=self.workload.digest)
        return plan

    def point_s(self, point: Point) -> float:
        """Return a point's predicted step time."""
        draft = self.space.draft(point)
        if draft.overlap != "backward":
            return predicted_s(self.space.plan(point, self.cluster))
        return draft.iteration_s(self._model)

    def plan_s(self, plan: Plan) -> float:
        """Return a plan's predicted step time by the current model."""
        return simulate_step(self.workload, self.cluster, plan).iteration_s

    @property
    def bound_s(self) -> float:
        """A lower bound on any plan's step time, less the model's error.

        A model corrected to explain one plan has a bound near that plan's time,
        although other plans may be faster, so the bound never rises above the first
        one.
        """
        bound_s = min(self._first_bound_s, self._bound_s())
        doubt = min(MAX_BOUND_DOUBT_RATIO, self.doubt_ratio)
        return bound_s / (1 + doubt)

    def _bound_s(self) -> float:
        workload = self.workload
        if self._wire_dtype is not None:
            workload = narrowed(workload, self._wire_dtype)
        # The plans that a search tries: those `joint` may choose by default.
        joint = planners.get("joint", max_lanes=self._max_lanes, **self._options)
        scope = joint.scope(self.cluster) or BoundScope(max_lanes=self._max_lanes)
        return scope.bound_s(workload, self.cluster)

    def floor_s(self, plan: Plan) -> float:
        """Return the shortest time of a plan's step, given the errors so far.

        The errors before the trials count, not those after a correction that explains
        the trials.
        """
        return self.plan_s(plan) / (1 + max(DOUBT_RATIO, self.doubt_ratio))

    def compare(self, plan: Plan, step_s: float) -> float:
        """Return the relative error of the prediction for a tried plan."""
        error = self.plan_s(plan) / step_s - 1
        self.doubt_ratio = max(self.doubt_ratio, abs(error))
        return error

    def learn(self, plan: Plan, step_s: float, timeline: Timeline | None) -> None:
        """Correct the model by the measured steps of a plan."""
        error = self.plan_s(plan) / step_s - 1
        seen = Observation(
            plan=plan,
            step_s=step_s,
            backward_s=None if timeline is None else backward_s(timeline),
            bucket_ends_s=() if timeline is None else bucket_ends_s(timeline),
        )
        self._observations = [*self._observations, seen][-_MAX_OBSERVATIONS:]
        if abs(error) > TRUSTED_RATIO:
            found = corrected(*self._first, self._observations)
            self.workload, self.cluster = found.workload, found.cluster
            self.factors = found.factors
            self._model = self._prepared()

    def _prepared(self) -> StepModel:
        sent = self.workload
        if self._wire_dtype is not None:
            sent = narrowed(sent, self._wire_dtype)
        return StepModel(sent, self.cluster)

    def replan(self, *, below_s: float = math.inf) -> Plan | None:
        """Return the planner's plan under the corrected model, or None.

        Return None without a search if no plan's step is shorter than ``below_s``.
        """
        if self._bound_s() >= below_s:
            return None
        try:
            plan = planners.plan_with_wire(
                self.workload,
                self.cluster,
                self._planner,
                wire_dtype=self._wire_dtype,
                near=[*(seen.plan for seen in self._observations), *self._replanned],
                **self._options,
            )
        except (Infeasible, SpecError):
            return None
        self._replanned = (plan,)
        return plan


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

_MAX_LOG = 1.5
_MAX_STEPS = 8

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
class FitCorrection:
    """A corrected model and its factors."""

    workload: Workload

    cluster: Cluster

    factors: dict[str, float]
    """By figure, its multiplier."""


def corrected(
    workload: Workload, cluster: Cluster, observations: Sequence[Observation]
) -> FitCorrection:
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
        return FitCorrection(
            workload=workload, cluster=cluster, factors=dict.fromkeys(names, 1.0)
        )
    best = _best(_Misses(workload, cluster, observations), _free(cluster))
    factors = {
        name: float(value)
        for name, value in zip(names, np.exp(best.theta), strict=True)
    }
    changed, network = scaled(workload, cluster, factors)
    return FitCorrection(workload=changed, cluster=network, factors=factors)


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


def _best(misses: _Misses, free: Sequence[int]) -> FitState:
    """Return the smallest sum of squares found.

    The model has kinks in which a search gets stuck. If the result from the fit is
    poor, the search restarts from the best of a few slower and faster networks.
    Evaluating all of these costs as much as one step of a search.
    """

    def search(begin: FitState) -> FitState:
        return least_squares(misses, begin, free=free, bound=_MAX_LOG, steps=_MAX_STEPS)

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
        self._model = StepModel(workload, cluster)
        self._seen = [
            (
                one,
                prepared(workload, cluster, one.plan) if can_replay(one.plan) else None,
            )
            for one in seen
        ]
        self.number = len(seen)

    def at(self, logarithms: dict[str, float]) -> FitState:
        """Return the residuals for some factors, given by their logarithms."""
        theta = np.array([logarithms.get(name, 0.0) for name in PRIOR_RATIO])
        return FitState(theta=theta, rows=self(theta))

    def __call__(self, theta: Vector) -> Vector:
        factors = dict(zip(PRIOR_RATIO, np.exp(theta).tolist(), strict=True))
        network = _rewired(self._cluster, factors)
        model = self._model.on(network, pace=factors["backward"])
        rows = (theta / self._priors).tolist()
        for seen, plan in self._seen:
            rows += self._of(seen, plan, model, network, factors)
        return np.array(rows)

    def _of(
        self,
        seen: Observation,
        plan: PreparedPlan | None,
        model: StepModel,
        network: Cluster,
        factors: dict[str, float],
    ) -> Iterator[float]:
        """Yield the residuals of one observation."""
        computed_s: float | None
        if plan is not None:
            times = model.times(plan)
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
    if seen is not None:
        compute = ComputeContention(alpha1=1.0, alpha2=alpha2)
        return replace(seen, compute=compute)
    # No evidence that computation slows a flow.
    return slowed_by_lanes(alpha2, bytes_per_s=link)


STEP = 0.05
"""Width of finite differences: a model with kinks has no meaningful local slope."""

_DAMPINGS = (0.03, 0.3, 3.0)
"""Factors on the diagonal, tried in turn until a step helps. Zero is not among them:
beyond a kink a figure may matter that does not matter here, and an undamped step would
overshoot it."""

_REACH = 0.7
"""The largest move of an entry in one step."""

_GAIN_RATIO = 3e-3
"""A step that promises or brings less than this share of the cost ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitState:
    """The end of a search."""

    theta: Vector

    rows: Vector
    """The residuals at ``theta``."""

    @property
    def cost(self) -> float:
        """Half of the sum of the squared residuals."""
        return float(self.rows @ self.rows) / 2


def least_squares(
    residuals: Callable[[Vector], Vector],
    begin: FitState,
    *,
    free: Sequence[int],
    bound: float,
    steps: int,
) -> FitState:
    r"""Run Levenberg-Marquardt from a point whose residuals are known.

    $\theta \leftarrow \theta - (J^T J + \lambda\, \mathrm{diag}(J^T J))^{-1} J^T r$
    with $J$ from differences over `STEP` and $\lambda$ the first of a few that lowers
    the cost, for at most ``steps`` steps. Only the entries ``free`` move, by at most
    ``bound`` from 0. The search ends early when the next step promises little.

    Source: Marquardt, J. SIAM 11(2), 1963. SciPy's implementation needs one more model
    evaluation per step, and a millisecond of overhead.
    """
    here = begin
    for _ in range(steps):
        slopes = _slopes(residuals, here, free)
        chosen = np.asarray(free)
        # An entry held back by its bound must not bend the step of the others.
        outward = here.theta[chosen] * (slopes.T @ here.rows) < 0
        moving = ~(outward & (np.abs(here.theta[chosen]) >= bound))
        slopes, chosen = slopes[:, moving], chosen[moving]
        normal, gradient = slopes.T @ slopes, slopes.T @ here.rows
        before = here.cost
        for damping in _DAMPINGS:
            damped = normal + damping * np.diag(np.diag(normal))
            move = np.clip(-np.linalg.solve(damped, gradient), -_REACH, _REACH)
            theta = here.theta.copy()
            theta[chosen] = np.clip(theta[chosen] + move, -bound, bound)
            moved = theta[chosen] - here.theta[chosen]
            promised = -float(gradient @ moved + moved @ normal @ moved / 2)
            if promised <= _GAIN_RATIO * before:
                break
            there = FitState(theta=theta, rows=residuals(theta))
            if there.cost < here.cost:
                here = there
                break
        if here.cost >= before * (1 - _GAIN_RATIO):
            break
    return here


def _slopes(
    residuals: Callable[[Vector], Vector], here: FitState, free: Sequence[int]
) -> Vector:
    columns = []
    for i in free:
        theta = here.theta.copy()
        # Toward 0, so that no bound is crossed.
        step = -STEP if theta[i] > 0 else STEP
        theta[i] += step
        columns.append((residuals(theta) - here.rows) / step)
    return np.stack(columns, axis=1)
