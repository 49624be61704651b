"""Brute force: the oracle for tests."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import Infeasible
from stretto.planners._joint.launch import tidy
from stretto.planners._joint.space import (
    RUNNABLE_DIMS,
    checked_algorithms,
    checked_dims,
    open_scope,
    space_of,
    with_algorithm,
)
from stretto.planners._orders import grouped
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    dtype_starts,
    finish,
    lanes_in_range,
    predicted_s,
    with_prediction,
)
from stretto.planners.ddp import CAP_BYTES, FIRST_CAP_BYTES, capped_ends
from stretto.planners.single import SinglePlanner
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners._joint.space import JointSpace
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.scope import BoundScope

MAX_TENSORS = 8
MAX_PLANS = 2_000_000
"""A minute or two of plans."""


@final
class ExhaustivePlanner(AbstractPlanner):
    """The best of all contiguous fusions, on 1, 2, ... ``max_lanes`` lanes.

    Each bucket is whole on any lane or in 2, 3, ... parts of any first lane; with
    ``dims`` as in `joint`, also every resource and algorithm for each bucket, every
    launch order with overlap ``forward``, and sending nothing before backward has ended
    (`single`).

    Lanes are equal, so a bucket opens no lane beyond the first unused one. Refuses more
    than 8 tensors or two million plans.
    """

    name: ClassVar[str] = "exhaustive"

    def __init__(
        self,
        *,
        max_lanes: int = 2,
        dims: str | Sequence[str] = RUNNABLE_DIMS,
        algorithms: str | Sequence[str] | None = None,
    ) -> None:
        """Set the largest number of lanes to try, and the open dimensions.

        ``algorithms``, where given, opens that dimension for these.
        """
        lanes_in_range(self.name, "max_lanes", max_lanes)
        self._max_lanes = max_lanes
        self._dims = with_algorithm(checked_dims(self.name, dims), algorithms)
        self._algorithms = checked_algorithms(self.name, algorithms)

    def scope(self, cluster: Cluster) -> BoundScope:
        """Return all plans in the open dimensions on as many lanes."""
        return open_scope(self._dims, self._max_lanes, cluster, self._algorithms)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the best of all, the simplest of equals."""
        if len(workload.tensors) > MAX_TENSORS:
            raise Infeasible(
                f"planner exhaustive takes at most {MAX_TENSORS} tensors, but workload "
                f"{workload.name!r} has {len(workload.tensors)}. Use planner joint."
            )
        space = space_of(
            self._dims, self._max_lanes, workload, cluster, self._algorithms
        )
        _require_few(workload, space)
        view = workload
        if not space.fusion:
            view = grouped(workload, (FIRST_CAP_BYTES, CAP_BYTES))
        model = StepModel(view, cluster)
        best = min(
            _drafts(view, space),
            key=lambda d: (d.iteration_s(model), d.collectives, d.lanes),
        )
        scope = self.scope(cluster)
        plan = finish(best, self.name, workload, cluster, scope, view=view)
        single = SinglePlanner().plan(workload, cluster)
        if space.fusion and predicted_s(single) < predicted_s(plan):
            faster = replace(single, planner=self.name)
            return with_prediction(faster, workload, cluster, scope)
        return plan


def _require_few(workload: Workload, space: JointSpace) -> None:
    """Require that all plans can be tried.

    Raises:
        Infeasible: there are too many.
    """
    kinds = len(space.resources) * len(space.algorithms)
    fusions = Counter(map(len, all_fusions(workload)))
    if not space.fusion:
        fusions = Counter([len(capped_ends(workload, FIRST_CAP_BYTES, CAP_BYTES))])
    found = 0
    for buckets, times in sorted(fusions.items()):
        orders = 1 + (math.factorial(buckets) if space.forward else 0)
        each = times * orders * kinds**buckets
        for lanes in range(1, space.max_lanes + 1):
            most = (MAX_PLANS - found) // each + 1
            sendings = itertools.islice(_sendings(buckets, lanes), most)
            found += each * sum(1 for _ in sendings)
            if found > MAX_PLANS:
                raise Infeasible(
                    f"planner exhaustive tries at most {MAX_PLANS:,} plans, and "
                    f"workload {workload.name!r} has more in these dimensions on up to "
                    f"{space.max_lanes} lanes. Use planner joint, or fewer lanes, "
                    "dimensions or tensors."
                )


def _drafts(workload: Workload, space: JointSpace) -> Iterator[Draft]:
    fusions = all_fusions(workload)
    if not space.fusion:
        fusions = iter([capped_ends(workload, FIRST_CAP_BYTES, CAP_BYTES)])
    kinds = list(itertools.product(space.resources, space.algorithms))
    for ends in fusions:
        for lanes in range(1, space.max_lanes + 1):
            for sending in _sendings(len(ends), lanes):
                slices = tuple(parts for _, parts in sending)
                if max(slices) > 1 and not space.slices:
                    continue
                for overlap, launch in _overlaps(len(ends), space):
                    for chosen in itertools.product(kinds, repeat=len(ends)):
                        yield Draft(
                            ends=ends,
                            lanes=lanes,
                            bucket_lanes=tuple(lane for lane, _ in sending),
                            slices=slices,
                            resources=tuple(resource for resource, _ in chosen),
                            algorithms=tuple(algorithm for _, algorithm in chosen),
                            overlap=overlap,
                            launch=launch,
                        )


def _overlaps(buckets: int, space: JointSpace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield overlap ``backward``, then ``forward`` in every launch order."""
    yield "backward", ()
    if space.forward:
        for order in itertools.permutations(range(buckets)):
            yield "forward", tidy(order)


def all_fusions(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Yield every partition of the tensors into contiguous buckets of one type."""
    starts = dtype_starts(workload)
    number = len(starts)
    forced = {i for i, start in enumerate(starts) if start == i and i}
    free = [i for i in range(1, number) if i not in forced]
    for cuts in itertools.product((False, True), repeat=len(free)):
        chosen = forced.union(itertools.compress(free, cuts))
        yield (*sorted(chosen), number)


def _sendings(buckets: int, lanes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (lane, slices) of every bucket, up to a renaming of unused lanes."""

    def extend(
        head: tuple[tuple[int, int], ...], used: int
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(head) == buckets:
            yield head
            return
        for lane in range(min(used + 1, lanes)):
            for parts in range(1, lanes + 1):
                yield from extend(
                    (*head, (lane, parts)), max(used, min(lanes, lane + parts))
                )

    yield from extend((), 0)
