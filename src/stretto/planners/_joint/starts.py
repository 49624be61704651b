"""Starting points of the search: families of equal buckets, each at its optimum."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from stretto.planners._coarse import coarse
from stretto.planners._joint.search import NEAR_RATIO, OTHER_PACES
from stretto.planners.aiacc import MAX_LANES
from stretto.planners.base import Draft, LinearCost, linear_cost
from stretto.planners.ddp import CAP_BYTES, FIRST_CAP_BYTES, capped_ends
from stretto.planners.fusion import FusionProblem
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stretto.planners._joint.space import JointSpace
    from stretto.schema import Cluster, Workload

_KINDS = 3
_FUSED_TENSORS = 128
_FORWARD_BUCKETS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def forward_starts(
    workload: Workload, space: JointSpace, drafts: Sequence[Draft]
) -> Iterator[Draft]:
    """Return drafts that will be ordered for overlap ``forward``.

    They are the fastest without it, and buckets of equal size, in several numbers, of
    the fastest one's kind. More and smaller buckets than without are good: what forward
    waits for at last is one bucket.
    """
    yield from drafts
    best = drafts[0]
    kind = (best.resources or (None,))[0], (best.algorithms or ("ring",))[0]
    total = sum(tensor.bytes for tensor in workload.tensors)
    fusions = dict.fromkeys(
        capped_ends(workload, cap, cap)
        for cap in (-(-total // number) for number in _FORWARD_BUCKETS)
        if cap and space.fusion
    )
    for lanes, slices in _families(space) if fusions else ():
        for ends in fusions:
            draft = Draft.in_turn(ends, lanes=lanes, slices=slices)
            yield _of_kind(draft, *kind)


def starts(
    workload: Workload,
    cluster: Cluster,
    space: JointSpace,
    value_s: Callable[[Draft], float],
) -> Iterator[Draft]:
    """Return the drafts with overlap ``backward`` from which to search in a space.

    Without fusion they have DDP's buckets, sent in every way that is the same for all.
    The best few pairs of resource and algorithm are tried on several lanes.
    """
    if not space.fusion:
        ends = capped_ends(workload, FIRST_CAP_BYTES, CAP_BYTES)
        for lanes, slices in _families(space):
            draft = Draft.in_turn(ends, lanes=lanes, slices=slices)
            for resource, algorithm in product(space.resources, space.algorithms):
                yield _of_kind(draft, resource, algorithm)
        return
    yield from _plain(workload, cluster, space)
    if not space.mixed:
        return
    model = StepModel(workload, cluster)
    # Climbing repairs the losses from joining neighbors.
    joined = coarse(workload, _FUSED_TENSORS)
    ranked: list[tuple[float, int, tuple[int | None, str]]] = []
    for kind in product(space.resources, space.algorithms):
        drafts = list(_of_all_kinds(joined, model, kind, 1, 1))
        yield from drafts
        ranked.append((min(map(value_s, drafts)), len(ranked), kind))
    kinds = [kind for _, _, kind in sorted(ranked)[:_KINDS]]
    # A choice that is slow on one lane may be best on many: it uses the least compute.
    kinds.append((space.resources[0], kinds[0][1]))
    for kind in dict.fromkeys(kinds):
        for lanes, slices in _families(space):
            if lanes > 1:
                yield from _of_all_kinds(joined, model, kind, lanes, slices)


def _plain(workload: Workload, cluster: Cluster, space: JointSpace) -> Iterator[Draft]:
    """Yield rings with the default resource, at the optimum for each pace and beyond.

    Beyond: with a deadline some thousandths later there are fewer buckets, which may be
    as good and is simpler.
    """
    problems = [_problem(_paced(workload, pace)) for pace in (1.0, *OTHER_PACES)]
    costs: dict[int, LinearCost] = {}
    for lanes, slices in _families(space):
        if lanes not in costs:
            costs[lanes] = linear_cost(workload, cluster, slices=lanes)
        cost = LinearCost(
            startup_s=costs[lanes].startup_s * slices / lanes,
            s_per_byte=costs[lanes].s_per_byte,
        )
        for ends in dict.fromkeys(ends for p in problems for ends in _fusions(p, cost)):
            yield Draft.in_turn(ends, lanes=lanes, slices=slices)


def _of_all_kinds(
    joined: tuple[Workload, tuple[int, ...]],
    model: StepModel,
    kind: tuple[int | None, str],
    lanes: int,
    slices: int,
) -> Iterator[Draft]:
    """Yield one kind of bucket, fused for its cost beside computation and without."""
    workload, whole_ends = joined
    problem = _problem(workload)
    fusions: dict[tuple[int, ...], None] = {}
    for working in (False, True):
        startup_s, s_per_byte = model.linear_cost(lanes, *kind, working=working)
        cost = LinearCost(startup_s=startup_s * slices / lanes, s_per_byte=s_per_byte)
        fusions.update(dict.fromkeys(_fusions(problem, cost)))
    for fused in fusions:
        ends = [whole_ends[end - 1] for end in fused]
        yield _of_kind(Draft.in_turn(ends, lanes=lanes, slices=slices), *kind)


def _of_kind(draft: Draft, resource: int | None, algorithm: str) -> Draft:
    number = len(draft.ends)
    return replace(
        draft,
        resources=() if resource is None else (resource,) * number,
        algorithms=() if algorithm == "ring" else (algorithm,) * number,
    )


def _families(space: JointSpace) -> Iterator[tuple[int, int]]:
    """Yield numbers of lanes, and of slices that divide them."""
    for lanes in _lane_numbers(space.max_lanes):
        for slices in range(1, lanes + 1 if space.slices else 2):
            if lanes % slices == 0:
                yield lanes, slices


def _paced(workload: Workload, pace: float) -> Workload:
    """Return the workload with a backward that takes ``pace`` times as long."""
    if pace == 1.0:
        return workload
    tensors = workload.tensors
    return replace(
        workload,
        backward_s=workload.backward_s * pace,
        tensors=tuple(replace(t, ready_s=t.ready_s * pace) for t in tensors),
    )


def _problem(workload: Workload) -> FusionProblem:
    """Return the fusion problem without costs, which are set later."""
    nothing = LinearCost(startup_s=0.0, s_per_byte=0.0)
    return FusionProblem(workload=workload, cost=nothing)


def _fusions(problem: FusionProblem, cost: LinearCost) -> Iterator[tuple[int, ...]]:
    workload, problem = problem.workload, problem.at(cost)
    end_s = max(problem.finish_s(), workload.backward_s)
    step_s = workload.forward_s + end_s
    for later_ratio in (0.0, NEAR_RATIO / 2, 2 * NEAR_RATIO):
        yield problem.fewest_buckets(end_s + later_ratio * step_s)


def _lane_numbers(max_lanes: int) -> tuple[int, ...]:
    """Return all numbers up to 8, then doubling, and the limit."""
    numbers = set(range(1, min(max_lanes, MAX_LANES) + 1)) | {max_lanes}
    power = 2 * MAX_LANES
    while power < max_lanes:
        numbers.add(power)
        power *= 2
    return tuple(sorted(numbers))
