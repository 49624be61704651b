"""Guide a search with a model: predictions, floors, corrections, new plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, final

from stretto import planners
from stretto.errors import Infeasible, SpecError
from stretto.planners.aiacc import MAX_LANES
from stretto.planners.base import predicted_s
from stretto.planners.wire import narrowed
from stretto.sim.scope import BoundScope
from stretto.sim.step import StepModel, simulate_step
from stretto.tune.correct import Observation, backward_s, bucket_ends_s, corrected
from stretto.tune.search_space import Space

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Timeline, Workload
    from stretto.tune.search_space import Point

TRUSTED_RATIO = 0.03
"""A prediction within this ratio of the measurement corrects nothing."""

DOUBT_RATIO = 0.03
"""Least error assumed of a prediction when a plan is ruled out without a trial."""

MOST_BOUND_DOUBT_RATIO = 0.10
"""Most that the bound is lowered by: a model further off says little about it."""

_MOST_OBSERVATIONS = 4


@final
class Guide:
    """The current workload and cluster estimates, and predictions from them."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        planner: str = "joint",
        wire_dtype: str | None = None,
        max_lanes: int = MAX_LANES,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.factors: dict[str, float] = {}
        """By figure, the multiplier from corrections; empty before the first."""
        self._first = (workload, cluster)
        self._planner = planner
        self._wire_dtype = wire_dtype
        self._max_lanes = max_lanes
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
        return self._model.iteration_s(
            draft.ends, draft.lanes, draft.bucket_lanes, draft.slices
        )

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
        doubt = min(MOST_BOUND_DOUBT_RATIO, self.doubt_ratio)
        return bound_s / (1 + doubt)

    def _bound_s(self) -> float:
        workload = self.workload
        if self._wire_dtype is not None:
            workload = narrowed(workload, self._wire_dtype)
        # The plans that a search tries: those `joint` may choose by default.
        joint = planners.get("joint", max_lanes=self._max_lanes)
        scope = joint.scope(self.cluster) or BoundScope(max_lanes=self._max_lanes)
        return scope.bound_s(workload, self.cluster)

    def floor_s(self, plan: Plan) -> float:
        """Return the least time of a plan's step, given the prediction errors so far.

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
        self._observations = [*self._observations, seen][-_MOST_OBSERVATIONS:]
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
            )
        except (Infeasible, SpecError):
            return None
        self._replanned = (plan,)
        return plan
