"""LIBRA: fusion and how much of the device each bucket may take, together."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners._libra.problem import problem_of
from stretto.planners._libra.search import Search, draft_of
from stretto.planners.base import AbstractPlanner, Draft, finish, linear_cost
from stretto.planners.fusion import FusionPlanner, FusionProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload


@final
class LibraPlanner(AbstractPlanner):
    r"""Buckets one after another on one lane, each at one of the cluster's levels of
    resource: the optimum of LIBRA's Eq. 23, by default without its grid.

    Searches: ``pareto``, exact up to ``slack_ratio`` of backward per bucket, by default
    as close as about a second allows; ``grid``, the paper's dynamic program on
    ``chunks`` (Z) in $O(L^2 Z J)$, or K times that where ``max_groups`` (K) is given;
    ``literal``, Algorithm 1 as printed with its slips mended, for small cases.
    ``resources`` (R) restricts the cluster's levels.

    ``startup``: ``phase`` as the simulator has it, ``mixed`` as Eq. 9-11 spread it over
    the message; the prediction is the simulator's.

    On a cluster without contention all levels are equal and the exact `fusion` is the
    optimum.
    """

    name: ClassVar[str] = "libra"

    def __init__(
        self,
        *,
        max_groups: int | None = None,
        chunks: int | None = None,
        resources: Sequence[int] | None = None,
        startup: str = "phase",
        search: str = "pareto",
        slack_ratio: float | None = None,
    ) -> None:
        """Fidelity; ``None``: no limit on buckets, four chunks a tensor, all levels."""
        self._limited = max_groups is not None
        self._resources = None if resources is None else tuple(resources)
        self._startup = startup
        self._search = Search(
            self.name,
            search=search,
            max_groups=max_groups,
            chunks=chunks,
            slack_ratio=slack_ratio,
        )

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """The best groups and levels on one lane.

        Raises:
            Infeasible: ``max_groups`` is below the number of runs of one type.
        """
        if cluster.contention is None and not self._limited:
            draft = Draft.of(FusionPlanner().plan(workload, cluster))
            return finish(draft, self.name, workload, cluster)
        problem, lasts = problem_of(
            workload, cluster, startup=self._startup, resources=self._resources
        )
        solution = self._search.solved(problem)
        fused = FusionProblem(workload=workload, cost=linear_cost(workload, cluster))
        ends = fused.with_empty(list(solution.ends))
        draft = draft_of(problem, solution, lasts, ends)
        return finish(draft, self.name, workload, cluster)
