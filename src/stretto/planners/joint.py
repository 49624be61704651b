"""Everything chosen together, on the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners._coarse import coarse
from stretto.planners._joint.search import (
    AGAIN,
    EQUAL_RATIO,
    FEW,
    FULL,
    GAIN_RATIO,
    NEAR_RATIO,
    OTHER_PACES,
    Search,
    has_few,
)
from stretto.planners._joint.space import (
    DIMS,
    RUNNABLE_DIMS,
    checked_dims,
    open_scope,
    space_of,
)
from stretto.planners._joint.starts import forward_starts, starts
from stretto.planners.aiacc import MAX_LANES, AiaccPlanner
from stretto.planners.asc_wfbp import AscWfbpPlanner
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    finish,
    lanes_in_range,
    positive,
    predicted_s,
)
from stretto.planners.ddp import DdpPlanner
from stretto.planners.fusion import FusionPlanner
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.libra import LibraPlanner
from stretto.planners.libra_m import LibraMPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.single import SinglePlanner
from stretto.planners.wfbp import WfbpPlanner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners._joint.search import Effort
    from stretto.planners._joint.space import Space
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.scope import BoundScope

__all__ = [
    "DIMS",
    "EQUAL_RATIO",
    "NEAR_RATIO",
    "OTHER_PACES",
    "RUNNABLE_DIMS",
    "JointPlanner",
]

LIBRA_TENSORS = 64
"""Up to so many `libra`'s own search takes a tenth of a second."""


@final
class JointPlanner(AbstractPlanner):
    """The fastest plan found over all dimensions that are open, under the simulator.

    ``dims`` opens ``fusion``, ``lanes``, ``slices``, ``resource`` (the levels of the
    cluster's ``contention``) and ``algorithm`` (ring, halving-doubling, tree, and
    hierarchical where hosts have several ranks), each for every bucket on its own, and
    overlap ``forward`` for all buckets; ``"all"`` opens all. By default those that the
    runtime carries out today. Without ``fusion`` the buckets are DDP's.

    Multi-start hill climbing. Starts: for every number of lanes ``k`` up to
    ``max_lanes`` and every number of slices ``s`` that divides it, all buckets in ``s``
    slices and taking the lanes in turn, fused by the exact sequential optimum for
    start-up ``a s / k`` and the rate that ``k`` lanes reach together (with ``s = k``
    buckets run one after another and this is the optimum of that family); the same for
    each resource and algorithm alone; and the plan of every other planner. The best few
    climb: a cut removed, moved or added, a bucket's slices, first lane, resource or
    algorithm changed, first improvement taken, within a fixed number of simulated
    collectives, and not beyond the bound that no plan beats. ``time_limit_s`` may end
    the climbing earlier; then the plan depends on the machine's speed.

    A plan that is fastest for exact times can be fragile: its buckets become ready the
    moment a lane is free, and when backward takes half as long again beside the
    communication, the link idles. Real systems also pay for each collective and each
    lane more than the model sees. So, unless ``sturdy`` is false, of the plans within
    0.5 % of the fastest one, and no slower than any other planner's, it looks for the
    least sum of iteration times at backward's measured pace, half slower and a quarter
    faster, and of those within 0.1 % of this sum it takes the one with the fewest
    collectives, then lanes, then buckets.
    """

    name: ClassVar[str] = "joint"

    def __init__(
        self,
        *,
        max_lanes: int = MAX_LANES,
        dims: str | Sequence[str] = RUNNABLE_DIMS,
        sturdy: bool = True,
        time_limit_s: float | None = None,
    ) -> None:
        """The most lanes, the open dimensions, and when to stop climbing."""
        lanes_in_range(self.name, "max_lanes", max_lanes)
        if time_limit_s is not None:
            positive(self.name, "time_limit_s", time_limit_s)
        self._max_lanes = max_lanes
        self._dims = checked_dims(self.name, dims)
        self._sturdy = sturdy
        self._time_limit_s = time_limit_s

    def scope(self, cluster: Cluster) -> BoundScope:
        """All plans in the open dimensions on as many lanes."""
        return open_scope(self._dims, self._max_lanes, cluster)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """The best plan found; on one rank, where nothing is sent, `ddp`'s."""
        if cluster.ranks == 1:
            return replace(DdpPlanner().plan(workload, cluster), planner=self.name)
        search = self._search(workload, cluster, FULL)
        space = search.space
        for draft, value_s in self._others(workload, cluster, space):
            if space.holds(draft):
                search.take(draft, value_s)
        # Equal up to rounding is not slower.
        ceiling_s = search.best_s * (1.0 + GAIN_RATIO)
        if len(space.resources) > 1 and space.fusion:
            search.value_s(_libra_draft(workload, cluster))
        return self._found(search, ceiling_s)

    def replan(
        self, workload: Workload, cluster: Cluster, near: Sequence[Plan]
    ) -> Plan:
        """The best plan found from these, DDP's, AIACC's and the families' optima.

        In two thirds to three quarters of `plan`'s time. With resources, algorithms,
        overlap ``forward`` or without fusion there is no short way.
        """
        search = self._search(workload, cluster, AGAIN)
        space = search.space
        if cluster.ranks == 1 or space.forward or space.mixed or not space.fusion:
            return self.plan(workload, cluster)
        aiacc = AiaccPlanner(max_lanes=space.max_lanes)
        names = [tensor.name for tensor in workload.tensors]
        for plan in (
            DdpPlanner().plan(workload, cluster),
            aiacc.plan(workload, cluster),
            *near,
        ):
            draft = replace(Draft.of(plan), resources=(), algorithms=())
            held = [name for bucket in plan.buckets for name in bucket.tensors]
            if held == names and space.holds(draft) and draft.overlap == "backward":
                search.value_s(draft)
        return self._found(search, search.best_s * (1.0 + GAIN_RATIO))

    def _found(self, search: Search, ceiling_s: float) -> Plan:
        """What climbing from the families' optima and from what is known finds."""
        workload, cluster, space = search.workload, search.cluster, search.space
        effort = search.effort
        for draft in starts(workload, cluster, space, search.value_s):
            search.value_s(draft)
        for draft in search.leaders(effort.climbs):
            search.climb(draft)
        search.climb_on(effort.more_climbs)
        if space.forward:
            leaders = search.leaders(2 * effort.climbs)
            for draft in forward_starts(workload, space, leaders):
                search.value_s(draft)
            for draft in search.leaders(effort.climbs // 2, "forward"):
                search.climb(draft)
            search.climb_on(1)
        # What a sturdy plan is climbed to may be faster than all before it.
        chosen = search.sturdiest(ceiling_s)
        if not self._sturdy:
            chosen = search.fastest()
        return finish(chosen, self.name, workload, cluster, self.scope(cluster))

    def _search(self, workload: Workload, cluster: Cluster, effort: Effort) -> Search:
        """A search in the open dimensions that has seen nothing yet."""
        space = space_of(self._dims, self._max_lanes, workload, cluster)
        return Search(
            workload,
            cluster,
            space,
            effort=FEW if has_few(workload) else effort,
            floor_s=self.scope(cluster).bound_s(workload, cluster),
            time_limit_s=self._time_limit_s,
        )

    def _others(
        self, workload: Workload, cluster: Cluster, space: Space
    ) -> Iterator[tuple[Draft, float]]:
        planners: list[AbstractPlanner] = [DdpPlanner()]
        if space.fusion:
            planners += [
                SinglePlanner(),
                WfbpPlanner(),
                HorovodPlanner(),
                MgWfbpPlanner(),
                FusionPlanner(),
                AiaccPlanner(max_lanes=space.max_lanes),
                AscWfbpPlanner(),
            ]
            if len(space.resources) > 1:
                planners.append(LibraMPlanner())
        for planner in planners:
            plan = planner.plan(workload, cluster)
            yield Draft.of(plan), predicted_s(plan)


def _libra_draft(workload: Workload, cluster: Cluster) -> Draft:
    """What `libra` chooses; where there are many tensors, with neighbours joined."""
    joined, ends = coarse(workload, LIBRA_TENSORS)
    draft = Draft.of(LibraPlanner().plan(joined, cluster))
    return replace(draft, ends=tuple(ends[end - 1] for end in draft.ends))
