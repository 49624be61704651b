"""Joint optimization of all open dimensions, on the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners._coarse import coarse
from stretto.planners._joint.launch import PACES, in_turn
from stretto.planners._joint.neighborhood import has_few
from stretto.planners._joint.search import (
    AGAIN,
    EQUAL_RATIO,
    FEW,
    FULL,
    GAIN_RATIO,
    NEAR_RATIO,
    OTHER_PACES,
    DraftSearch,
)
from stretto.planners._joint.space import (
    ALGORITHMS,
    DIMS,
    RUNNABLE_DIMS,
    checked_algorithms,
    checked_dims,
    open_scope,
    space_of,
    with_algorithm,
)
from stretto.planners._joint.starts import forward_starts, starts
from stretto.planners._orders import (
    alternates,
    grouped,
    in_order,
    num_runs,
    view_of,
    views,
)
from stretto.planners.aiacc import MAX_LANES, AiaccPlanner
from stretto.planners.asc_wfbp import AscWfbpPlanner
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    finish,
    lanes_in_range,
    positive,
    predicted_s,
    with_prediction,
)
from stretto.planners.ddp import CAP_BYTES, FIRST_CAP_BYTES, DdpPlanner
from stretto.planners.fusion import FusionPlanner
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.libra import LibraPlanner
from stretto.planners.libra_m import LibraMPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.single import SinglePlanner
from stretto.planners.wfbp import WfbpPlanner
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.planners._joint.search import Effort
    from stretto.planners._joint.space import JointSpace
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.scope import BoundScope

__all__ = [
    "ALGORITHMS",
    "DIMS",
    "EQUAL_RATIO",
    "NEAR_RATIO",
    "OTHER_PACES",
    "RUNNABLE_DIMS",
    "JointPlanner",
]

LIBRA_TENSORS = 64
"""Up to this many tensors `libra`'s own search takes a tenth of a second."""


@final
class JointPlanner(AbstractPlanner):
    """The fastest plan found over all dimensions that are open, under the simulator.

    ``dims`` opens ``fusion``, ``lanes``, ``slices``, ``resource`` (the levels of the
    cluster's ``contention``) and ``algorithm`` (ring, halving-doubling, tree, and
    hierarchical where hosts have several ranks), each for every bucket separately, and
    overlap ``forward`` with a launch order; ``"all"`` opens all. ``algorithms`` opens
    that dimension for some of them, such as ``"ring,hierarchical"``, which the runtime
    executes. The default is the dimensions that the runtime applies to every script.
    Without ``fusion`` the buckets are DDP's.

    The method is multi-start hill climbing. Starts: for every number of lanes ``k`` up
    to ``max_lanes`` and every number of slices ``s`` that divides it, all buckets in
    ``s`` slices and taking the lanes in turn, fused by the exact sequential optimum for
    start-up ``a s / k`` and the rate that ``k`` lanes reach together (with ``s = k``
    buckets run one after another and this is the optimum of that family); the same for
    each resource and algorithm alone; and the plan of every other planner. The best few
    climb: a cut removed, moved or added, a bucket's slices, first lane, resource or
    algorithm changed, first improvement taken, within a fixed number of simulated
    collectives, and only until they reach the lower bound. If buckets may differ in
    resource or algorithm, simulated annealing from the best of them follows, with a
    fixed seed and a fixed number of simulations. Overlap ``forward`` is searched last:
    the best drafts so far and equal buckets of many sizes, each launched in the order
    in which one pipe would send what forward needs first, at three rates of the pipe;
    the best climb, where a bucket's place in the launch order may change too.
    ``time_limit_s`` may end the climbing earlier; then the plan depends on the
    machine's speed.

    A plan that is fastest for exact times can be fragile: its buckets become ready the
    moment a lane is free, and when backward takes half as long again beside the
    communication, the link idles. Real systems also pay more for each collective and
    each lane than the model predicts. So, unless ``robust`` is false, it considers the
    plans within 0.5 % of the fastest one that are no slower than any other planner's.
    Among them it minimizes the sum of step times at backward's measured pace, half
    slower and a quarter faster. Of the plans within 0.1 % of this sum it takes the one
    with the fewest collectives, then lanes, then buckets.
    """

    name: ClassVar[str] = "joint"

    def __init__(
        self,
        *,
        max_lanes: int = MAX_LANES,
        dims: str | Sequence[str] = RUNNABLE_DIMS,
        algorithms: str | Sequence[str] | None = None,
        robust: bool = True,
        time_limit_s: float | None = None,
    ) -> None:
        """Set the limit of lanes, the open dimensions, and when to stop climbing."""
        lanes_in_range(self.name, "max_lanes", max_lanes)
        if time_limit_s is not None:
            positive(self.name, "time_limit_s", time_limit_s)
        self._max_lanes = max_lanes
        self._dims = with_algorithm(checked_dims(self.name, dims), algorithms)
        self._algorithms = checked_algorithms(self.name, algorithms)
        self._robust = robust
        self._time_limit_s = time_limit_s

    def scope(self, cluster: Cluster) -> BoundScope:
        """Return all plans in the open dimensions on as many lanes."""
        return open_scope(self._dims, self._max_lanes, cluster, self._algorithms)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the best plan found; on one rank, where nothing is sent, `ddp`'s.

        Where types alternate, the search uses the most promising order of tensors.
        """
        if cluster.ranks == 1:
            return replace(DdpPlanner().plan(workload, cluster), planner=self.name)
        search = self._begun(workload, cluster)
        view, space = search.workload, search.space
        for plan in self._others(view, cluster, space):
            draft = Draft.of(plan)
            if in_order(view, plan) and space.holds(draft):
                search.take(draft, predicted_s(plan))
        # Equal up to rounding is not slower.
        ceiling_s = search.best_s * (1.0 + GAIN_RATIO)
        if len(space.resources) > 1 and space.fusion:
            search.value_s(_libra_draft(view, cluster))
        found = self._found(search, ceiling_s, workload)
        if not alternates(workload):
            return found
        return self._no_slower(found, workload, cluster, space)

    def replan(
        self, workload: Workload, cluster: Cluster, near: Sequence[Plan]
    ) -> Plan:
        """Return the best plan from ``near``, DDP's, AIACC's and the families' optima.

        Takes two thirds to three quarters of `plan`'s time. With resources, algorithms
        or without fusion it is no faster than `plan`.
        """
        view = workload
        if near and alternates(workload):
            view = _nearest_view(workload, cluster, near)
        search = self._search(view, cluster, AGAIN)
        space = search.space
        if cluster.ranks == 1 or space.mixed or not space.fusion:
            return self.plan(workload, cluster)
        aiacc = AiaccPlanner(max_lanes=space.max_lanes)
        ddp = DdpPlanner().plan(workload, cluster)
        for plan in (ddp, aiacc.plan(view, cluster), *near):
            draft = replace(Draft.of(plan), resources=(), algorithms=())
            known = in_order(view, plan) and space.holds(draft)
            if known and draft.overlap != "none":
                search.value_s(draft)
        found = self._found(search, search.best_s * (1.0 + GAIN_RATIO), workload)
        # Equal up to rounding is not slower.
        if predicted_s(ddp) < predicted_s(found) * (1.0 - GAIN_RATIO):
            return self._own(ddp, workload, cluster)
        return found

    def _begun(self, workload: Workload, cluster: Cluster) -> DraftSearch:
        """Return a search in the order of tensors whose families' optima are best."""
        caps_bytes = (FIRST_CAP_BYTES, CAP_BYTES)
        orders = views(workload, caps_bytes)
        if "fusion" not in self._dims:
            orders = (grouped(workload, caps_bytes),)
        searches = [self._search(view, cluster, FULL) for view in orders]
        if len(searches) > 1:
            for search in searches:
                space = search.space
                for draft in starts(search.workload, cluster, space, search.value_s):
                    search.value_s(draft)
        ratio = EQUAL_RATIO if self._robust else GAIN_RATIO
        limit_s = min(search.best_s for search in searches) * (1.0 + ratio)
        good = [search for search in searches if search.best_s <= limit_s]
        return min(good, key=lambda search: (num_runs(search.workload), search.best_s))

    def _no_slower(
        self, found: Plan, workload: Workload, cluster: Cluster, space: JointSpace
    ) -> Plan:
        """Return the plan, or another planner's in another order if that is faster."""
        best = found
        for plan in self._others(workload, cluster, space):
            faster = predicted_s(plan) < predicted_s(best) * (1.0 - GAIN_RATIO)
            if faster and space.holds(Draft.of(plan)):
                best = plan
        return found if best is found else self._own(best, workload, cluster)

    def _own(self, plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
        """Return another planner's plan as this one's, with the bound of this scope."""
        own = replace(plan, planner=self.name)
        return with_prediction(own, workload, cluster, self.scope(cluster))

    def _found(self, search: DraftSearch, ceiling_s: float, workload: Workload) -> Plan:
        """Return the result of climbing from the families' optima and from known plans.

        The search may have the tensors of the workload in another order.
        """
        view, cluster, space = search.workload, search.cluster, search.space
        effort = search.effort
        for draft in starts(view, cluster, space, search.value_s):
            search.value_s(draft)
        for draft in search.leaders(effort.climbs):
            search.climb(draft)
        search.climb_on(effort.more_climbs)
        search.anneal()
        if space.forward:
            self._extend(search)
        # Climbing for a robust plan may find a faster one than all before.
        chosen = search.most_robust(ceiling_s)
        if not self._robust:
            chosen = search.fastest()
        scope = self.scope(cluster)
        return finish(chosen, self.name, workload, cluster, scope, view=view)

    def _extend(self, search: DraftSearch) -> None:
        """Search drafts of which some buckets continue during the next forward."""
        if search.enough:
            return
        effort, orders = search.effort, search.orders
        leaders = search.leaders(2 * effort.climbs)
        for draft in forward_starts(search.workload, search.space, leaders):
            search.value_s(in_turn(orders.of(draft)))
        for draft in search.leaders(2 * effort.climbs, "forward"):
            for pace in PACES:
                ordered = orders.of(draft, pace)
                search.value_s(ordered)
                search.value_s(in_turn(ordered))
        for draft in search.leaders(effort.climbs, "forward"):
            search.climb(draft)
        search.climb_on(effort.more_climbs)

    def _search(
        self, workload: Workload, cluster: Cluster, effort: Effort
    ) -> DraftSearch:
        """Return a search in the open dimensions without any drafts."""
        space = space_of(
            self._dims, self._max_lanes, workload, cluster, self._algorithms
        )
        return DraftSearch(
            workload,
            cluster,
            space,
            effort=FEW if has_few(workload) else effort,
            floor_s=self.scope(cluster).bound_s(workload, cluster),
            time_limit_s=self._time_limit_s,
        )

    def _others(
        self, workload: Workload, cluster: Cluster, space: JointSpace
    ) -> Iterator[Plan]:
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
            yield planner.plan(workload, cluster)


def _nearest_view(
    workload: Workload, cluster: Cluster, near: Sequence[Plan]
) -> Workload:
    """Return the workload in the order of the fastest of some plans."""
    best = min(near, key=lambda p: simulate_step(workload, cluster, p).iteration_s)
    return view_of(workload, best)


def _libra_draft(workload: Workload, cluster: Cluster) -> Draft:
    """Return `libra`'s choice; neighbors are joined where there are many tensors."""
    joined, ends = coarse(workload, LIBRA_TENSORS)
    draft = Draft.of(LibraPlanner().plan(joined, cluster))
    return replace(draft, ends=tuple(ends[end - 1] for end in draft.ends))
