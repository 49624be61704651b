"""Fusion, lanes and slices chosen together, on the simulator."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.aiacc import MAX_LANES, AiaccPlanner
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    LinearCost,
    dtype_starts,
    finish,
    linear_cost,
    positive,
)
from stretto.planners.ddp import DdpPlanner
from stretto.planners.fusion import FusionPlanner, FusionProblem
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.single import SinglePlanner
from stretto.planners.wfbp import WfbpPlanner
from stretto.schema import Cluster, Workload
from stretto.sim.step import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stretto.schema import Plan

NEAR_RATIO = 5e-3
"""How much slower than the fastest plan found a sturdier or plainer one may be."""

EQUAL_RATIO = 1e-3
"""Plans whose scores are this close count as equally good; the plainest is taken."""

OTHER_PACES = (0.8, 1.5)
"""Durations of backward, over the measured one, at which plans must do well too."""

CLIMBS = 4
WORK_LIMIT = 12_000
"""Collectives that all simulations of one climb may have: a budget that does not depend
on the machine, so that the plan does not either."""

_FEW_TENSORS = 16
_GAIN_RATIO = 1e-9
_POOL = 200


@final
class JointPlanner(AbstractPlanner):
    """The fastest plan found over fusion, lanes and slices, under the simulator.

    Multi-start hill climbing. Starts: for every number of lanes ``k`` up to
    ``max_lanes`` and every number of slices ``s`` that divides it, all buckets in ``s``
    slices and taking the lanes in turn, fused by the exact sequential optimum for
    start-up ``a s / k`` and the rate that ``k`` lanes reach together (with ``s = k``
    buckets run one after another and this is the optimum of that family); and the plan
    of every other planner. The best few climb: a cut removed, moved or added, a
    bucket's slices or first lane changed, first improvement taken, within a fixed
    number of simulated collectives.

    A plan that is fastest for exact times can be fragile: its buckets become ready the
    moment a lane is free, and when backward takes half as long again beside the
    communication, the link idles. Real systems also pay for each collective and each
    lane more than the model sees. So of the plans within 0.5 % of the fastest one, and
    no slower than any other planner's, it looks for the least sum of iteration times at
    backward's measured pace, half slower and a quarter faster, and of those within
    0.1 % of this sum it takes the one with the fewest collectives, then lanes, then
    buckets.
    """

    name: ClassVar[str] = "joint"

    def __init__(self, *, max_lanes: int = MAX_LANES) -> None:
        """The largest number of lanes a plan may use."""
        positive(self.name, "max_lanes", max_lanes)
        self._max_lanes = max_lanes

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """The best plan found; on one rank, where nothing is sent, `ddp`'s."""
        others = [
            planner.plan(workload, cluster)
            for planner in (
                DdpPlanner(),
                SinglePlanner(),
                WfbpPlanner(),
                HorovodPlanner(),
                MgWfbpPlanner(),
                FusionPlanner(),
                AiaccPlanner(max_lanes=self._max_lanes),
            )
        ]
        if cluster.ranks == 1:
            return replace(others[0], planner=self.name)
        search = _Search(workload, cluster)
        for plan in others:
            search.take(Draft.of(plan), _iteration_s(plan))
        # Equal up to rounding is not slower.
        ceiling_s = search.best_s * (1.0 + _GAIN_RATIO)
        for draft in _starts(workload, cluster, self._max_lanes):
            search.value_s(draft)
        for draft in search.leaders(CLIMBS):
            search.climb(draft)
        sturdy = search.sturdiest(ceiling_s)
        return finish(sturdy, self.name, workload, cluster)


def _iteration_s(plan: Plan) -> float:
    if plan.predicted is None:
        raise AssertionError("a planner's plan carries its prediction")
    return plan.predicted.iteration_s


def _paced(workload: Workload, pace: float) -> Workload:
    """The workload with a backward that takes ``pace`` times as long."""
    if pace == 1.0:
        return workload
    tensors = workload.tensors
    return replace(
        workload,
        backward_s=workload.backward_s * pace,
        tensors=tuple(replace(t, ready_s=t.ready_s * pace) for t in tensors),
    )


def _starts(workload: Workload, cluster: Cluster, max_lanes: int) -> Iterator[Draft]:
    """Every family of equal buckets, at its optimum for each pace and a little beyond.

    Beyond: with a deadline some thousandths later there are fewer buckets, which may be
    as good and is simpler.
    """
    paced = [_paced(workload, pace) for pace in (1.0, *OTHER_PACES)]
    for lanes in _lane_numbers(max_lanes):
        together = linear_cost(workload, cluster, slices=lanes)
        for slices in (s for s in range(1, lanes + 1) if lanes % s == 0):
            cost = LinearCost(
                startup_s=together.startup_s * slices / lanes,
                s_per_byte=together.s_per_byte,
            )
            fusions = dict.fromkeys(ends for w in paced for ends in _fusions(w, cost))
            for ends in fusions:
                yield Draft.in_turn(ends, lanes=lanes, slices=slices)


def _fusions(workload: Workload, cost: LinearCost) -> Iterator[tuple[int, ...]]:
    problem = FusionProblem(workload=workload, cost=cost)
    end_s = max(problem.finish_s(), workload.backward_s)
    step_s = workload.forward_s + end_s
    for later_ratio in (0.0, NEAR_RATIO / 2, 2 * NEAR_RATIO):
        yield problem.fewest_buckets(end_s + later_ratio * step_s)


def _lane_numbers(max_lanes: int) -> tuple[int, ...]:
    """All up to 8, then doubling, and the limit."""
    numbers = set(range(1, min(max_lanes, MAX_LANES) + 1)) | {max_lanes}
    power = 2 * MAX_LANES
    while power < max_lanes:
        numbers.add(power)
        power *= 2
    return tuple(sorted(numbers))


@dataclass(slots=True)
class _Search:
    """What has been simulated, and the moves from one draft to the next."""

    workload: Workload

    cluster: Cluster

    best_s: float = float("inf")

    _model: StepModel = field(init=False)

    _paced_models: tuple[StepModel, ...] = field(init=False)

    _values: dict[Draft, float] = field(default_factory=dict)

    _scores: dict[Draft, float] = field(default_factory=dict)

    _cuts: tuple[int, ...] = field(init=False)
    """Where buckets may end: after the last tensor of each ready time."""

    _dtype_starts: tuple[int, ...] = field(init=False)

    _work: int = 0

    def __post_init__(self) -> None:
        self._model = StepModel(self.workload, self.cluster)
        self._paced_models = tuple(
            StepModel(_paced(self.workload, pace), self.cluster) for pace in OTHER_PACES
        )
        self._dtype_starts = dtype_starts(self.workload)
        tensors = self.workload.tensors
        every = len(tensors) <= _FEW_TENSORS
        self._cuts = tuple(
            i
            for i in range(1, len(tensors))
            if every
            or tensors[i].ready_s > tensors[i - 1].ready_s
            or self._dtype_starts[i] == i
        )

    def take(self, draft: Draft, iteration_s: float) -> None:
        """Remembers a draft whose value is known."""
        self._values[draft] = iteration_s
        self.best_s = min(self.best_s, iteration_s)

    def value_s(self, draft: Draft) -> float:
        """Iteration time of a draft, simulated once."""
        value = self._values.get(draft)
        if value is None:
            self._work += draft.collectives + len(draft.ends)
            value = self._model.iteration_s(
                draft.ends, draft.lanes, draft.bucket_lanes, draft.slices
            )
            self.take(draft, value)
        return value

    def leaders(self, number: int) -> list[Draft]:
        """The fastest drafts, at most two of one number of lanes and slices."""
        chosen: list[Draft] = []
        of_family: dict[tuple[int, int], int] = {}
        for draft in sorted(
            self._values, key=lambda d: (self._values[d], _plainness(d))
        ):
            family = (draft.lanes, max(draft.slices))
            if draft.overlap != "backward" or of_family.get(family, 0) == 2:
                continue
            of_family[family] = of_family.get(family, 0) + 1
            chosen.append(draft)
            if len(chosen) == number:
                break
        return chosen

    def climb(self, draft: Draft) -> None:
        """Hill climbing from a draft towards the least iteration time."""
        self._climbed(draft, self.value_s)

    def _climbed(self, draft: Draft, objective: Callable[[Draft], float]) -> Draft:
        """What climbing reaches: bucket by bucket from the last, again and again, until
        a whole round finds nothing better or the work is used up.
        """
        limit = self._work + WORK_LIMIT
        bucket = len(draft.ends) - 1
        fruitless = 0
        while fruitless < len(draft.ends) and self._work < limit:
            here = objective(draft)
            for other in self._neighbours(draft, bucket):
                if objective(other) < here * (1.0 - _GAIN_RATIO):
                    draft = other
                    fruitless = -1
                    break
                if self._work >= limit:
                    break
            fruitless += 1
            bucket = (min(bucket, len(draft.ends)) - 1) % len(draft.ends)
        return draft

    def sturdiest(self, ceiling_s: float) -> Draft:
        """The plainest draft of the least score, near the fastest, under the ceiling.

        Climbs once more, by score; then makes plainer what stays as good.
        """
        limit_s = min(self.best_s * (1.0 + NEAR_RATIO), ceiling_s)
        near = sorted(
            (draft for draft, value in self._values.items() if value <= limit_s),
            key=lambda d: (self._values[d], _plainness(d)),
        )
        draft = min(near[:_POOL], key=lambda d: (self._score(d), _plainness(d)))
        if draft.overlap == "backward":
            draft = self._climbed(draft, lambda d: self._score_within(d, limit_s))
        good_s = self._score(draft) * (1.0 + EQUAL_RATIO)
        draft = min(
            (d for d, score in self._scores.items() if score <= good_s),
            key=lambda d: (_plainness(d), self._scores[d]),
        )
        limit = self._work + WORK_LIMIT
        plainer: Draft | None = draft
        while plainer is not None and self._work < limit:
            draft = plainer
            plainer = next(
                (
                    other
                    for other in _plainer(draft, self._dtype_starts)
                    if self._score_within(other, limit_s) <= good_s
                ),
                None,
            )
        return draft

    def _score(self, draft: Draft) -> float:
        """Sum of iteration times at the measured pace and at the others."""
        score = self._scores.get(draft)
        if score is None:
            score = self.value_s(draft)
            for pace, model in zip(OTHER_PACES, self._paced_models, strict=True):
                if draft.overlap == "none":
                    late_s = (pace - 1.0) * self.workload.backward_s
                    score += self.value_s(draft) + late_s
                else:
                    self._work += draft.collectives + len(draft.ends)
                    score += model.iteration_s(
                        draft.ends, draft.lanes, draft.bucket_lanes, draft.slices
                    )
            self._scores[draft] = score
        return score

    def _score_within(self, draft: Draft, limit_s: float) -> float:
        return self._score(draft) if self.value_s(draft) <= limit_s else float("inf")

    def _neighbours(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        yield from self._other_cuts(draft, bucket)
        yield from self._other_sending(draft, bucket)

    def _other_cuts(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        begin = draft.ends[bucket - 1] if bucket else 0
        end = draft.ends[bucket]
        if begin and self._dtype_starts[begin] != begin:
            before = draft.ends[bucket - 2] if bucket > 1 else 0
            yield _merged(draft, bucket - 1)
            for cut in _steps(self._between(before, begin)[::-1]):
                yield _with_end(draft, bucket - 1, cut)
            for cut in _steps(self._between(begin, end)):
                yield _with_end(draft, bucket - 1, cut)
        inside = self._between(begin, end)
        if len(inside) <= _FEW_TENSORS:
            cuts: Sequence[int] = inside
        else:
            cuts = [inside[len(inside) * i // 8] for i in range(1, 8)]
        for cut in cuts:
            same = draft.bucket_lanes[bucket]
            turn = (same + draft.slices[bucket]) % draft.lanes
            for lane in dict.fromkeys((same, turn)):
                yield _split(draft, bucket, cut, lane)

    def _other_sending(self, draft: Draft, bucket: int) -> Iterator[Draft]:
        if draft.lanes == 1:
            return
        now = (draft.bucket_lanes[bucket], draft.slices[bucket])
        for slices in range(1, draft.lanes + 1):
            lanes = range(draft.lanes) if slices < draft.lanes else (now[0],)
            for lane in lanes:
                if (lane, slices) != now:
                    yield replace(
                        draft,
                        bucket_lanes=_put(draft.bucket_lanes, bucket, lane),
                        slices=_put(draft.slices, bucket, slices),
                    )

    def _between(self, begin: int, end: int) -> tuple[int, ...]:
        """Candidate cuts strictly between two tensors, within what types allow."""
        low = bisect_right(self._cuts, begin)
        high = bisect_left(self._cuts, end)
        return self._cuts[low:high]


def _plainness(draft: Draft) -> tuple[int, int, int, tuple[int, ...]]:
    return (draft.collectives, draft.lanes, len(draft.ends), draft.ends)


def _plainer(draft: Draft, starts: tuple[int, ...]) -> Iterator[Draft]:
    """Drafts with fewer collectives or lanes, the greatest savings first."""
    used = max(
        lane + slices
        for lane, slices in zip(draft.bucket_lanes, draft.slices, strict=True)
    )
    if used < draft.lanes:
        yield replace(draft, lanes=used)
    for bucket in range(len(draft.ends) - 1):
        end = draft.ends[bucket]
        if starts[end] != end:
            yield _merged(draft, bucket)
    for bucket, slices in enumerate(draft.slices):
        for fewer in dict.fromkeys((1, slices // 2, slices - 1)):
            if 0 < fewer < slices:
                yield replace(draft, slices=_put(draft.slices, bucket, fewer))


def _steps(cuts: Sequence[int]) -> list[int]:
    """The first, second, fourth, ... of some cuts."""
    return [cuts[2**i - 1] for i in range(len(cuts).bit_length())]


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _without(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return values[:index] + values[index + 1 :]


def _with_end(draft: Draft, bucket: int, end: int) -> Draft:
    return replace(draft, ends=_put(draft.ends, bucket, end))


def _merged(draft: Draft, bucket: int) -> Draft:
    """A bucket and the next as one, sent like the one in more slices."""
    keeps_next = draft.slices[bucket + 1] > draft.slices[bucket]
    gone = bucket if keeps_next else bucket + 1
    return replace(
        draft,
        ends=_without(draft.ends, bucket),
        slices=_without(draft.slices, gone),
        bucket_lanes=_without(draft.bucket_lanes, gone),
    )


def _split(draft: Draft, bucket: int, cut: int, lane: int) -> Draft:
    """A bucket in two, the second on a lane, both in as many slices as before."""
    after = bucket + 1
    return replace(
        draft,
        ends=(*draft.ends[:bucket], cut, *draft.ends[bucket:]),
        slices=(*draft.slices[:after], *draft.slices[bucket:]),
        bucket_lanes=(*draft.bucket_lanes[:after], lane, *draft.bucket_lanes[after:]),
    )
