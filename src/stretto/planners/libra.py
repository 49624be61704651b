"""LIBRA: fusion and the resource of each bucket, chosen together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners._coarse import coarse
from stretto.planners._libra.problem import problem_of
from stretto.planners._libra.search import LibraSearch, draft_of
from stretto.planners.base import AbstractPlanner, Draft, finish, linear_cost
from stretto.planners.fusion import FusionPlanner, FusionProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Plan, Workload

MAX_TENSORS = 320
"""Up to this many tensors the default search takes about two seconds at most."""


@final
class LibraPlanner(AbstractPlanner):
    r"""Buckets one after another on one lane, each at one of the cluster's levels.

    It is the optimum of LIBRA's Eq. 23, by default without its grid.

    Searches: ``pareto``, exact up to ``slack_ratio`` of backward per bucket, by default
    as close as about a second allows; ``grid``, the paper's dynamic program on
    ``chunks`` (Z) in $O(L^2 Z J)$, or K times that if ``max_groups`` (K) is given;
    ``literal``, Algorithm 1 as printed with its errors fixed, for small cases.
    ``resources`` (R) restricts the cluster's levels.

    ``startup``: ``phase`` as the simulator has it, ``mixed`` as Eq. 9-11 spread it over
    the message; the prediction is the simulator's.

    With more than 320 tensors the default search joins neighbors until about 320 are
    left: its time grows with the square of their number, but its loss does not.

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
        """Set the fidelity; ``None``: any buckets, four chunks a tensor, all levels."""
        self._limited = max_groups is not None
        self._resources = None if resources is None else tuple(resources)
        self._startup = startup
        self._search = LibraSearch(
            self.name,
            search=search,
            max_groups=max_groups,
            chunks=chunks,
            slack_ratio=slack_ratio,
        )

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the best groups and levels on one lane.

        Raises:
            Infeasible: ``max_groups`` is below the number of runs of one type.
        """
        if cluster.contention is None and not self._limited:
            draft = Draft.of(FusionPlanner().plan(workload, cluster))
            return finish(draft, self.name, workload, cluster)
        joined, ends_of = workload, tuple(range(1, len(workload.tensors) + 1))
        if self._search.may_join:
            joined, ends_of = coarse(workload, MAX_TENSORS)
        problem, lasts = problem_of(
            joined, cluster, startup=self._startup, resources=self._resources
        )
        solution = self._search.solved(problem)
        fused = FusionProblem(workload=joined, cost=linear_cost(workload, cluster))
        ends = fused.with_empty(list(solution.ends))
        draft = draft_of(problem, solution, lasts, ends)
        draft = replace(draft, ends=tuple(ends_of[end - 1] for end in draft.ends))
        return finish(draft, self.name, workload, cluster)
