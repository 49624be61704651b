"""LIBRA-M: the resource of each bucket of a given fusion."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import SpecError
from stretto.planners._libra.problem import problem_of
from stretto.planners._libra.search import LibraSearch, draft_of
from stretto.planners.base import AbstractPlanner, Draft, finish
from stretto.planners.ddp import DdpPlanner
from stretto.planners.fusion import FusionPlanner
from stretto.planners.horovod import HorovodPlanner
from stretto.planners.mg_wfbp import MgWfbpPlanner
from stretto.planners.wfbp import WfbpPlanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload

_FUSIONS: dict[str, type[AbstractPlanner]] = {
    planner.name: planner
    for planner in (
        MgWfbpPlanner,
        FusionPlanner,
        HorovodPlanner,
        DdpPlanner,
        WfbpPlanner,
    )
}


@final
class LibraMPlanner(AbstractPlanner):
    """Another planner's buckets on one lane, each at its best level of resource.

    The levels minimize the step: LIBRA's Eq. 16-19. Options as with `libra`; ``fusion``
    names the planner of the buckets, by default MG-WFBP's greedy as in the paper.
    """

    name: ClassVar[str] = "libra-m"

    def __init__(
        self,
        *,
        fusion: str = MgWfbpPlanner.name,
        chunks: int | None = None,
        resources: Sequence[int] | None = None,
        startup: str = "phase",
        search: str = "pareto",
        slack_ratio: float | None = None,
    ) -> None:
        """Set fusion and fidelity; ``None``: four chunks a bucket, all levels."""
        if fusion not in _FUSIONS:
            raise SpecError(
                f"planner {self.name}: fusion must be one of {', '.join(_FUSIONS)}, "
                f"got {fusion!r}"
            )
        self._fusion = _FUSIONS[fusion]
        self._resources = None if resources is None else tuple(resources)
        self._startup = startup
        self._search = LibraSearch(
            self.name,
            search=search,
            max_groups=None,
            chunks=chunks,
            slack_ratio=slack_ratio,
        )

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the fusion with the best level of resource for each bucket."""
        given = Draft.of(self._fusion().plan(workload, cluster))
        if cluster.contention is None:
            return finish(given, self.name, workload, cluster)
        problem, lasts = problem_of(
            workload,
            cluster,
            startup=self._startup,
            resources=self._resources,
            ends=given.ends,
        )
        solution = self._search.solved(problem)
        draft = draft_of(problem, solution, lasts, given.ends)
        return finish(draft, self.name, workload, cluster)
