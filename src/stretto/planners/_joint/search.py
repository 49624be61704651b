"""Simulated drafts, and the search that climbs from one draft to the next."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from stretto.planners._joint.anneal import Neighbors, annealed
from stretto.planners._joint.launch import LaunchOrders
from stretto.planners._joint.moves import complexity, simpler_drafts
from stretto.planners._joint.neighborhood import Neighborhood
from stretto.planners._joint.space import JointSpace
from stretto.planners.base import Draft
from stretto.schema import Cluster, Workload
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable


NEAR_RATIO = 5e-3
"""How much slower than the fastest plan a more robust or simpler one may be."""

EQUAL_RATIO = 1e-3
"""Plans whose scores differ by less count as equal; the simplest is taken."""

OTHER_PACES = (0.8, 1.5)
"""Durations of backward, relative to the measured one, used in a plan's score."""

_FORWARD_WORK = 2
"""Time to order and to simulate a collective that may continue during forward, relative
to one that may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of a search."""

    climbs: int
    """Drafts to climb from."""

    more_climbs: int
    """How often to climb from the best draft again, while that helps."""

    helps_ratio: float
    """Gain of a climb that justifies another."""

    work_limit: int
    """Collectives that one climb may simulate: a budget that does not depend on the
    machine, so that the plan does not either."""

    anneal_rounds: int
    """Number of annealing runs, each from the best draft."""

    anneal_evaluations: int
    """Drafts that annealing tries, if buckets may differ in kind."""

    anneal_work: int
    """Collectives that annealing may simulate."""

    pool: int
    """Number of drafts near the fastest among which the most robust is chosen."""

    enough_ratio: float
    """Distance from the lower bound within which climbing stops."""


GAIN_RATIO = 1e-9

FULL = Effort(
    climbs=4,
    more_climbs=4,
    helps_ratio=GAIN_RATIO,
    work_limit=12_000,
    anneal_rounds=4,
    anneal_evaluations=3_000,
    anneal_work=150_000,
    pool=200,
    enough_ratio=1e-5,
)

FEW = replace(FULL, climbs=16, enough_ratio=0.0)
"""For workloads with so few tensors that a climb costs next to nothing."""

AGAIN = replace(FULL, climbs=2, helps_ratio=1e-3, enough_ratio=1e-4)
"""For workloads close to one whose plans are known."""


@dataclass(slots=True)
class DraftSearch:
    """Values of drafts, and climbing from one to the next."""

    workload: Workload

    cluster: Cluster

    space: JointSpace

    effort: Effort = FULL

    floor_s: float = 0.0
    """Lower bound on every plan's step."""

    time_limit_s: float | None = None

    best_s: float = float("inf")

    _model: StepModel = field(init=False)

    _paced_models: tuple[StepModel, ...] = field(init=False)

    _values: dict[Draft, float] = field(default_factory=dict)

    _scores: dict[Draft, float] = field(default_factory=dict)

    orders: LaunchOrders = field(init=False)

    _neighborhood: Neighborhood = field(init=False)

    _work: int = 0
    """Collectives simulated so far."""

    _deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline_s = float("inf")
        if self.time_limit_s is not None:
            self._deadline_s = time.monotonic() + self.time_limit_s
        self._model = StepModel(self.workload, self.cluster)
        self._paced_models = tuple(
            self._model.on(self.cluster, pace=pace) for pace in OTHER_PACES
        )
        self.orders = LaunchOrders(self.workload, self.cluster)
        self._neighborhood = Neighborhood(self.workload, self.space, self.orders)

    def take(self, draft: Draft, iteration_s: float) -> None:
        """Store a draft whose value is known."""
        self._values[draft] = iteration_s
        self.best_s = min(self.best_s, iteration_s)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self._deadline_s

    def value_s(self, draft: Draft) -> float:
        """Return the step time of a draft, simulated once."""
        value = self._values.get(draft)
        if value is None:
            self._count(draft)
            value = draft.iteration_s(self._model)
            self.take(draft, value)
        return value

    def leaders(self, number: int, overlap: str = "backward") -> list[Draft]:
        """Return the fastest drafts of one overlap.

        At most half of them belong to one family: the same numbers of lanes and slices,
        resources and algorithms.
        """
        chosen: list[Draft] = []
        of_family: dict[object, int] = {}
        for draft in self._ranked():
            family = (
                draft.lanes,
                max(draft.slices),
                *map(frozenset, (draft.resources, draft.algorithms)),
            )
            if draft.overlap != overlap or of_family.get(family, 0) == max(
                number // 2, 1
            ):
                continue
            of_family[family] = of_family.get(family, 0) + 1
            chosen.append(draft)
            if len(chosen) == number:
                break
        return chosen

    def fastest(self) -> Draft:
        """Return the simplest of the fastest drafts, up to rounding."""
        limit_s = self.best_s * (1.0 + GAIN_RATIO)
        return min(
            (draft for draft, value in self._values.items() if value <= limit_s),
            key=lambda d: (complexity(d), self._values[d]),
        )

    def _count(self, draft: Draft) -> None:
        work = draft.collectives + len(draft.ends)
        if draft.overlap == "forward":
            work *= _FORWARD_WORK
        self._work += work

    def climb(self, draft: Draft) -> None:
        """Climb from a draft toward the shortest step time.

        A draft that sends nothing during backward has no moves and is unchanged.
        """
        if draft.overlap != "none" and not self.enough:
            self._climbed(draft, self.value_s)

    @property
    def enough(self) -> bool:
        """Whether the best is so close to the bound that climbing is useless."""
        return self.best_s <= self.floor_s * (1.0 + self.effort.enough_ratio)

    def climb_on(self, rounds: int) -> None:
        """Climb from the fastest draft again, while that helps."""
        for _ in range(rounds):
            before_s = self.best_s
            self.climb(self.fastest())
            if self.best_s >= before_s * (1.0 - self.effort.helps_ratio):
                break

    def anneal(self) -> None:
        """Anneal from the fastest draft and climb from the best found, a few times.

        If all buckets have one resource and algorithm, climbing is as good.
        """
        places = self._neighborhood
        for seed in range(self.effort.anneal_rounds):
            draft = self.fastest()
            if not self.space.mixed or draft.overlap != "backward" or self.enough:
                return
            rng = random.Random(seed)
            limit = self._work + self.effort.anneal_work
            annealed(
                draft,
                Neighbors(rng, self.space, places.between, places.dtype_starts),
                self.value_s,
                rng,
                self.effort.anneal_evaluations,
                may_continue=partial(self._may_continue, limit),
            )
            self.climb_on(1)

    def _may_continue(self, limit: int) -> bool:
        return self._work < limit and not self.out_of_time

    def _ranked(self) -> list[Draft]:
        return sorted(self._values, key=lambda d: (self._values[d], complexity(d)))

    def _climbed(self, draft: Draft, objective: Callable[[Draft], float]) -> Draft:
        """Return the result of climbing: bucket by bucket from the last, repeatedly.

        It ends when a whole round finds nothing better or the budget is exhausted.
        """
        limit = self._work + self.effort.work_limit
        bucket = len(draft.ends) - 1
        fruitless = 0
        while (
            fruitless < len(draft.ends) and self._work < limit and not self.out_of_time
        ):
            here = objective(draft)
            for other in self._neighborhood.of(draft, bucket):
                if objective(other) < here * (1.0 - GAIN_RATIO):
                    draft = other
                    fruitless = -1
                    break
                if self._work >= limit:
                    break
            fruitless += 1
            bucket = (min(bucket, len(draft.ends)) - 1) % len(draft.ends)
        return draft

    def most_robust(self, ceiling_s: float) -> Draft:
        """Return the simplest draft of the lowest score, fast and under the ceiling.

        Climbs once more, by score, then simplifies where the score stays as good.
        """
        limit_s = min(self.best_s * (1.0 + NEAR_RATIO), ceiling_s)
        near = [draft for draft in self._ranked() if self._values[draft] <= limit_s]
        draft = min(
            near[: self.effort.pool], key=lambda d: (self._score(d), complexity(d))
        )
        if draft.overlap != "none":
            draft = self._climbed(draft, lambda d: self._score_within(d, limit_s))
        good_s = self._score(draft) * (1.0 + EQUAL_RATIO)
        draft = min(
            (d for d, score in self._scores.items() if score <= good_s),
            key=lambda d: (complexity(d), self._scores[d]),
        )
        limit = self._work + self.effort.work_limit
        simpler: Draft | None = draft
        starts = self._neighborhood.dtype_starts
        while simpler is not None and self._work < limit and not self.out_of_time:
            draft = simpler
            simpler = next(
                (
                    other
                    for other in simpler_drafts(draft, starts)
                    if (self.space.fusion or len(other.ends) == len(draft.ends))
                    and self._score_within(other, limit_s) <= good_s
                ),
                None,
            )
        return draft

    def _score(self, draft: Draft) -> float:
        """Return the sum of step times at the measured pace and at the others."""
        score = self._scores.get(draft)
        if score is None:
            score = self.value_s(draft)
            for model in self._paced_models:
                self._count(draft)
                score += draft.iteration_s(model)
            self._scores[draft] = score
        return score

    def _score_within(self, draft: Draft, limit_s: float) -> float:
        return self._score(draft) if self.value_s(draft) <= limit_s else float("inf")
