"""Simulated drafts, and the search that climbs from one draft to the next."""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from stretto.planners._joint.anneal import Neighbors, annealed
from stretto.planners._joint.moves import (
    merged,
    plainer,
    plainness,
    split,
    steps,
    turned,
    with_algorithm,
    with_end,
    with_resource,
    with_sending,
)
from stretto.planners._joint.space import Space
from stretto.planners.base import Draft, dtype_starts
from stretto.schema import Cluster, Workload
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


NEAR_RATIO = 5e-3
"""How much slower than the fastest plan a sturdier or plainer one may be."""

EQUAL_RATIO = 1e-3
"""Plans whose scores differ by less count as equal; the plainest is taken."""

OTHER_PACES = (0.8, 1.5)
"""Durations of backward, relative to the measured one, used in a plan's score."""

_FEW_TENSORS = 16
_FEW_LANES = 3
_FORWARD_WORK = 16
"""The event engine's time for a collective, relative to the step model's."""


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
    """Number of drafts near the fastest among which the sturdiest is chosen."""

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
class Search:
    """Values of drafts, and the moves from one to the next."""

    workload: Workload

    cluster: Cluster

    space: Space

    effort: Effort = FULL

    floor_s: float = 0.0
    """Lower bound on every plan's iteration."""

    time_limit_s: float | None = None

    best_s: float = float("inf")

    _model: StepModel = field(init=False)

    _paced_models: tuple[StepModel, ...] = field(init=False)

    _values: dict[Draft, float] = field(default_factory=dict)

    _scores: dict[Draft, float] = field(default_factory=dict)

    _cuts: tuple[int, ...] = field(init=False)
    """Where buckets may end: after the last tensor of each ready time."""

    _dtype_starts: tuple[int, ...] = field(init=False)

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
        self._dtype_starts = dtype_starts(self.workload)
        tensors = self.workload.tensors
        every = self.few
        self._cuts = tuple(
            i
            for i in range(1, len(tensors))
            if every
            or tensors[i].ready_s > tensors[i - 1].ready_s
            or self._dtype_starts[i] == i
        )

    def take(self, draft: Draft, iteration_s: float) -> None:
        """Store a draft whose value is known."""
        self._values[draft] = iteration_s
        self.best_s = min(self.best_s, iteration_s)

    @property
    def few(self) -> bool:
        """Whether there are few enough tensors to try more."""
        return has_few(self.workload)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self._deadline_s

    def value_s(self, draft: Draft) -> float:
        """Return the iteration time of a draft, simulated once."""
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
        """Return the plainest of the fastest drafts, up to rounding."""
        limit_s = self.best_s * (1.0 + GAIN_RATIO)
        return min(
            (draft for draft, value in self._values.items() if value <= limit_s),
            key=lambda d: (plainness(d), self._values[d]),
        )

    def _count(self, draft: Draft) -> None:
        work = draft.collectives + len(draft.ends)
        if draft.overlap == "forward":
            work *= _FORWARD_WORK
        self._work += work

    def climb(self, draft: Draft) -> None:
        """Climb from a draft toward the shortest iteration time.

        A draft that sends nothing under backward has no moves and is unchanged.
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
        for seed in range(self.effort.anneal_rounds):
            draft = self.fastest()
            if not self.space.mixed or draft.overlap != "backward" or self.enough:
                return
            rng = random.Random(seed)
            limit = self._work + self.effort.anneal_work
            annealed(
                draft,
                Neighbors(rng, self.space, self._between, self._dtype_starts),
                self.value_s,
                rng,
                self.effort.anneal_evaluations,
                goes_on=partial(self._goes_on, limit),
            )
            self.climb_on(1)

    def _goes_on(self, limit: int) -> bool:
        return self._work < limit and not self.out_of_time

    def _ranked(self) -> list[Draft]:
        return sorted(self._values, key=lambda d: (self._values[d], plainness(d)))

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
            for other in self._neighbours(draft, bucket):
                if objective(other) < here * (1.0 - GAIN_RATIO):
                    draft = other
                    fruitless = -1
                    break
                if self._work >= limit:
                    break
            fruitless += 1
            bucket = (min(bucket, len(draft.ends)) - 1) % len(draft.ends)
        return draft

    def sturdiest(self, ceiling_s: float) -> Draft:
        """Return the plainest draft of the least score, fast and under the ceiling.

        Climbs once more, by score, then simplifies where the score stays as good.
        """
        limit_s = min(self.best_s * (1.0 + NEAR_RATIO), ceiling_s)
        near = [draft for draft in self._ranked() if self._values[draft] <= limit_s]
        draft = min(
            near[: self.effort.pool], key=lambda d: (self._score(d), plainness(d))
        )
        if draft.overlap != "none":
            draft = self._climbed(draft, lambda d: self._score_within(d, limit_s))
        good_s = self._score(draft) * (1.0 + EQUAL_RATIO)
        draft = min(
            (d for d, score in self._scores.items() if score <= good_s),
            key=lambda d: (plainness(d), self._scores[d]),
        )
        limit = self._work + self.effort.work_limit
        simpler: Draft | None = draft
        while simpler is not None and self._work < limit and not self.out_of_time:
            draft = simpler
            simpler = next(
                (
                    other
                    for other in plainer(draft, self._dtype_starts)
                    if (self.space.fusion or len(other.ends) == len(draft.ends))
                    and self._score_within(other, limit_s) <= good_s
                ),
                None,
            )
        return draft

    def _score(self, draft: Draft) -> float:
        """Return the sum of iteration times at the measured pace and at the others."""
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

    def _neighbours(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        if self.space.fusion:
            yield from self._other_cuts(draft, bucket)
        yield from self._other_sending(draft, bucket)
        yield from self._other_kinds(draft, bucket)

    def _other_cuts(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        begin = draft.ends[bucket - 1] if bucket else 0
        end = draft.ends[bucket]
        if begin and self._dtype_starts[begin] != begin:
            before = draft.ends[bucket - 2] if bucket > 1 else 0
            yield merged(draft, bucket - 1)
            for cut in steps(self._between(before, begin)[::-1]):
                yield with_end(draft, bucket - 1, cut)
            for cut in steps(self._between(begin, end)):
                yield with_end(draft, bucket - 1, cut)
        inside = self._between(begin, end)
        if len(inside) <= _FEW_TENSORS:
            cuts: Sequence[int] = inside
        else:
            cuts = [inside[len(inside) * i // 8] for i in range(1, 8)]
        for cut in cuts:
            same = draft.bucket_lanes[bucket]
            turn = (same + draft.slices[bucket]) % draft.lanes
            for lane in dict.fromkeys((same, turn)):
                yield split(draft, bucket, cut, lane)
            if self.few and draft.lanes <= _FEW_LANES:
                yield from _on_all_lanes(split(draft, bucket, cut, same), bucket)

    def _other_sending(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        if draft.lanes == 1:
            return
        now = (draft.bucket_lanes[bucket], draft.slices[bucket])
        for slices in range(1, draft.lanes + 1 if self.space.slices else 2):
            lanes = range(draft.lanes) if slices < draft.lanes else (now[0],)
            for lane in lanes:
                if (lane, slices) != now:
                    yield with_sending(draft, bucket, lane, slices)
        # This one and all later ones, shifted by some lanes.
        for turn in range(1, draft.lanes):
            yield turned(draft, bucket, turn)

    def _other_kinds(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        """Yield another resource or algorithm, for the bucket or from it on."""
        number = len(draft.ends)
        if len(self.space.resources) > 1:
            now = draft.resources[bucket] if draft.resources else None
            for resource in self.space.resources:
                if resource != now:
                    yield with_resource(draft, bucket, resource)
        if len(self.space.algorithms) > 1:
            algorithm_now = draft.algorithms[bucket] if draft.algorithms else "ring"
            for algorithm in self.space.algorithms:
                if algorithm != algorithm_now:
                    yield with_algorithm(draft, bucket, algorithm)
        if bucket == number - 1 and draft.resources:
            for resource in self.space.resources:
                yield replace(draft, resources=(resource,) * number)

    def _between(self, begin: int, end: int) -> tuple[int, ...]:
        """Return cuts strictly between two tensors, within what types allow."""
        low = bisect_right(self._cuts, begin)
        high = bisect_left(self._cuts, end)
        return self._cuts[low:high]


def has_few(workload: Workload) -> bool:
    """Return whether there are few enough tensors to try more."""
    return len(workload.tensors) <= _FEW_TENSORS


def _on_all_lanes(draft: Draft, bucket: int) -> Iterator[Draft]:
    """Yield a bucket and the next on any lanes, and all later ones shifted."""
    lanes = range(draft.lanes)
    for first, second, turn in product(lanes, repeat=3):
        other = with_sending(draft, bucket, first, draft.slices[bucket])
        other = with_sending(other, bucket + 1, second, draft.slices[bucket + 1])
        yield turned(other, bucket + 2, turn)
