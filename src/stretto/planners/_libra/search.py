"""Select and run a search, and return its result as a draft."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.errors import Infeasible, SpecError
from stretto.planners._libra.grid import solve_grid
from stretto.planners._libra.literal import solve_literal
from stretto.planners._libra.pareto import solve_pareto
from stretto.planners._libra.problem import Solution
from stretto.planners.base import Draft, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners._libra.problem import LibraProblem

SEARCHES = ("pareto", "grid", "literal")
DEFAULT_MAX_GROUPS = 10
DEFAULT_CHUNKS = 150
MAX_LITERAL_STEPS = 20_000_000


class LibraSearch:
    """A search with its fidelity, validated once."""

    def __init__(
        self,
        planner: str,
        *,
        search: str,
        max_groups: int | None,
        chunks: int | None,
        slack_ratio: float | None,
    ) -> None:
        """Require valid options.

        Raises:
            SpecError: naming planner, option and value.
        """
        if search not in SEARCHES:
            raise SpecError(
                f"planner {planner}: search must be one of {', '.join(SEARCHES)}, "
                f"got {search!r}"
            )
        for name, value in (("max_groups", max_groups), ("chunks", chunks)):
            if value is not None:
                positive(planner, name, value)
        if slack_ratio is not None and not 0 <= slack_ratio < 1:
            raise SpecError(
                f"planner {planner}: slack_ratio must be >= 0 and < 1, "
                f"got {slack_ratio:g}"
            )
        self._planner = planner
        self._search = search
        self._max_groups = max_groups
        self._chunks = chunks
        self._slack_ratio = slack_ratio

    @property
    def may_join(self) -> bool:
        """Whether no fidelity was requested, so that neighbors may be joined."""
        return self._search == "pareto" and self._slack_ratio is None

    def solved(self, problem: LibraProblem) -> Solution:
        """Return the groups found, with their exact time, off the grid.

        Raises:
            Infeasible: too few groups are allowed, or the literal search would take
                hours.
        """
        if self._search == "pareto":
            ratio = self._slack_ratio
            return solve_pareto(
                problem,
                slack_s=None if ratio is None else ratio * problem.work_s,
                max_groups=self._max_groups,
            )
        if self._search == "grid":
            found = solve_grid(
                problem,
                chunks=self._chunks or max(1, 4 * problem.size),
                max_groups=self._max_groups,
            )
        else:
            found = self._literal(problem)
        exact_s = problem.backward_s(found.ends, found.levels)
        return Solution(ends=found.ends, levels=found.levels, backward_s=exact_s)

    def _literal(self, problem: LibraProblem) -> Solution:
        groups = self._max_groups or DEFAULT_MAX_GROUPS
        chunks = self._chunks or DEFAULT_CHUNKS
        size = max(1, problem.size)
        steps = groups * (size * chunks) ** 2 * len(problem.levels) // 4
        if steps > MAX_LITERAL_STEPS:
            raise Infeasible(
                f"planner {self._planner}: the literal search would take {steps:.1e} "
                f"steps, more than {MAX_LITERAL_STEPS:.0e}. Use search 'grid', which "
                "finds the same, or fewer chunks."
            )
        return solve_literal(problem, max_groups=groups, chunks=chunks)


def draft_of(
    problem: LibraProblem,
    solution: Solution,
    lasts: Sequence[int],
    ends: Sequence[int],
) -> Draft:
    """Return a draft with buckets up to ``ends``, each with its group's resource.

    ``lasts``: the last tensor with bytes of each of the problem's items.
    """
    group_lasts = [lasts[end - 1] for end in solution.ends]
    resources: list[int | None] = []
    begin = 0
    for end in ends:
        group = bisect_left(group_lasts, begin)
        held = group < len(group_lasts) and group_lasts[group] < end
        level = problem.levels[solution.levels[group]] if held else None
        resources.append(level.resource if level else None)
        begin = end
    return replace(Draft.in_turn(ends), resources=tuple(resources))
