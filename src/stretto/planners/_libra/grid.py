"""LIBRA's dynamic program on its grid, in terms of delays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stretto.planners._libra.bound import FluidBound
from stretto.planners._libra.problem import (
    CHUNK_SLACK,
    Solution,
    first_chunk,
    with_fewer_groups,
)

if TYPE_CHECKING:
    from stretto.planners._libra.problem import LibraProblem


def solve_grid(
    problem: LibraProblem, *, chunks: int, max_groups: int | None = None
) -> Solution:
    r"""Return Algorithm 1's optimum on a grid of ``chunks``, without its loop over z'.

    Let $D = T - z w$, the delay. A message that fits needs
    $n = \lceil \sigma_r (a + p_r m) / w \rceil$ chunks and adds
    $(a + p_r m)(1 - \sigma_r)$ to D. Waiting costs no delay, so D never rises with z,
    and of the z' that leave room the last, $z - n$, is best:
    $D_l(z) = \min_{l', r} D_{l'}(z - n) + pen$, in $O(L^2 Z J)$. Only the last edge,
    where a message may outlast the work, takes a scan over z'. K only limits the
    number of groups; ``None`` takes one pass instead of K.

    ``backward_s`` is the grid's, at most (groups - 1) chunks above the optimum's
    (Theorem 2); without the grid the same groups are no slower. A coarser grid first
    gives a limit: its groups, merged if they exceed K. States that cannot beat the
    limit by the fluid bound are left out.

    Raises:
        Infeasible: ``max_groups`` is below the number that types require.
    """
    problem.check_groups(max_groups)
    if not problem.size or not problem.work_s:
        ends = problem.after_work_ends(0)
        levels = (problem.best_idle,) * len(ends)
        return Solution(
            ends=ends, levels=levels, backward_s=problem.backward_s(ends, levels)
        )
    coarse: Solution | None = None
    if chunks * problem.size > _SMALL:
        coarse = _Grid(problem, max(1, chunks // 6), None).solved()
    found = _Grid(problem, chunks, None, coarse).solved()
    if max_groups is None or len(found.ends) <= max_groups:
        return found
    return _Grid(problem, chunks, max_groups, found).solved()


_SMALL = 1000
"""Smaller tables are solved directly, without a coarser grid first."""

BOUND_SLACK = 1e-6
"""Chunks of tolerance for the bound: needs are rounded down by up to `CHUNK_SLACK`."""


class _Grid:
    """The tables of one run; rows are items sent, columns are edges."""

    def __init__(
        self,
        problem: LibraProblem,
        chunks: int,
        max_groups: int | None,
        known: Solution | None = None,
    ) -> None:
        import numpy as np

        self.problem, self.chunks, self.max_groups = problem, chunks, max_groups
        self.w = problem.work_s / chunks
        self.total = np.array(problem.total_bytes, dtype=float)
        self.first_chunk = [
            first_chunk(ready_s, self.w, chunks) for ready_s in problem.ready_s
        ]
        self.limit_s = np.inf
        self.fluid: FluidBound | None = None
        self.lowest_s = np.zeros(problem.size + 1)
        self.after_s = problem.after_work_s()
        if known is not None:
            if max_groups is not None:
                known = with_fewer_groups(problem, known, max_groups)
            self.limit_s = self._delay_s(known) * (1.0 + 1e-9) + 1e-300
            items = np.arange(problem.size)
            ready = np.array(problem.ready_s)
            self.fluid = FluidBound(problem)
            self.lowest_s[:-1] = self.fluid.of(items, ready)

    def _delay_s(self, solution: Solution) -> float:
        """Return the delay of given groups on the grid."""
        problem = self.problem
        edge, begin, delay_s = 0, 0, 0.0
        for end, j in zip(solution.ends, solution.levels, strict=True):
            level = problem.levels[j]
            size_bytes = problem.total_bytes[end] - problem.total_bytes[begin]
            begin = end
            edge = max(edge, self.first_chunk[end - 1])
            delay_s += problem.alone_s(level, edge * self.w, size_bytes)
            need_s = (problem.startup_s + level.s_per_byte * size_bytes) * level.sigma
            edge += math.ceil(need_s / self.w - CHUNK_SLACK)
            edge = min(edge, self.chunks)
        return delay_s

    def solved(self) -> Solution:
        if self.max_groups is None:
            return self._traced([self._start(), self._pass()])
        return self._traced(list(self._passes(self.max_groups)))

    def _start(self) -> Any:
        import numpy as np

        table = np.full((self.problem.size + 1, self.chunks + 1), np.inf)
        table[0] = 0.0
        return table

    def _pass(self) -> Any:
        """Return delays with any number of groups."""
        import numpy as np

        problem, chunks, size = self.problem, self.chunks, self.problem.size
        table = self._start()
        # Columns: padding for unreachable states, then the edges.
        apron = chunks + 1
        padded = np.full((size + 1, apron + chunks + 1), np.inf)
        padded[0, apron:] = 0.0
        lowest_before = padded[:, -1].copy()  # delays never rise with the edge
        windows = np.lib.stride_tricks.sliding_window_view(padded, chunks, axis=1)
        masked = 0
        for l in range(1, size + 1):  # noqa: E741
            low, first = self.first_chunk[l - 1], problem.firsts[l - 1]
            # Later groups start later still, so earlier edges are unreachable for all.
            padded[:l, apron + masked : apron + low] = np.inf
            masked = low
            row = table[l]
            needs, penalties = self._fits(first, l)
            hope_s = lowest_before[first:l] + self.lowest_s[l]
            for need, penalty in zip(needs, penalties, strict=True):
                near = np.flatnonzero(
                    (need <= chunks - low) & (hope_s + penalty <= self.limit_s)
                )
                if len(near):
                    shifted = windows[near + first, apron - need[near]]
                    shifted += penalty[near, None]
                    np.minimum(row[:chunks], shifted.min(axis=0), out=row[:chunks])
            hope_s = lowest_before[first:l] + self._late_s(penalties, l)
            rows = np.flatnonzero(hope_s <= self.limit_s) + first
            if len(rows):
                row[chunks] = self._last_edge(padded[rows, apron + low :], rows, l)[0]
            np.minimum.accumulate(row, out=row)
            padded[l, apron:] = row
            lowest_before[l] = row[chunks]
        return table

    def _passes(self, groups: int) -> Any:
        """Return delays with at most 0, 1, ... ``groups`` groups.

        A state is extended only if it beats the one with fewer groups, which leads to
        the same states with one group less, and if it may beat the limit by the fluid
        bound.
        """
        import numpy as np

        problem, chunks, size = self.problem, self.chunks, self.problem.size
        tables = np.full((groups + 1, size + 1, chunks + 1), np.inf)
        tables[:, 0] = 0.0
        apron = chunks + 1
        padded = np.full((groups, size + 1, apron + chunks + 1), np.inf)
        padded[0, 0, apron:] = 0.0
        windows = np.lib.stride_tricks.sliding_window_view(padded, chunks, axis=2)
        # Of the states to extend: the lowest delay and the last edge.
        lowest = np.full((groups, size + 1), np.inf)
        lowest[0, 0] = 0.0
        last = np.full((groups, size + 1), -1)
        last[0, 0] = chunks
        edges_s = np.arange(chunks + 1) * self.w
        columns = np.arange(chunks + 1)
        masked = 0
        for l in range(1, size + 1):  # noqa: E741
            low, first = self.first_chunk[l - 1], problem.firsts[l - 1]
            padded[:, :l, apron + masked : apron + low] = np.inf
            lowest[:, :l][last[:, :l] < low] = np.inf
            masked = low
            rows_new = tables[1:, l]
            needs, penalties = self._fits(first, l)
            bound_s = self._bound_s(l, edges_s)
            fits = needs <= chunks - low
            cap_s = self.limit_s - bound_s[low]
            late_s = self._late_s(penalties, l)
            for i in range(groups):
                before = lowest[i, first:l]
                if before.min() == np.inf:
                    continue
                hope_s = before + penalties
                level, near = np.nonzero(fits & (hope_s <= cap_s))
                if len(near):
                    need, hope_s = needs[level, near], hope_s[level, near]
                    # Edges that some group reaches and that may beat the limit.
                    near += first
                    begin = low + int(need.min())
                    end = min(
                        chunks,
                        int((last[i, near] + need).max()) + 1,
                        int(
                            np.searchsorted(
                                bound_s, self.limit_s - hope_s.min(), side="right"
                            )
                        ),
                    )
                    if begin < end:
                        shifted = windows[i, :, :, begin:end][near, apron - need]
                        shifted += penalties[level, near - first][:, None]
                        shifted.min(axis=0, out=rows_new[i, begin:end])
                late = np.flatnonzero(before + late_s <= self.limit_s) + first
                if len(late):
                    rows_new[i, chunks] = self._last_edge(
                        padded[i, late, apron + low :], late, l
                    )[0]
            np.minimum.accumulate(rows_new, axis=1, out=rows_new)
            np.minimum.accumulate(rows_new, axis=0, out=rows_new)
            fresh = rows_new[:-1] < tables[:-2, l]
            fresh &= rows_new[:-1] + bound_s <= self.limit_s
            kept = np.where(fresh, rows_new[:-1], np.inf)
            padded[1:, l, apron:] = kept
            lowest[1:, l] = kept.min(axis=1)
            last[1:, l] = np.where(fresh, columns, -1).max(axis=1)
        return tables

    def _bound_s(self, sent: int, edges_s: Any) -> Any:
        """Return the lowest delay that unsent items add, by edge; it never falls."""
        import numpy as np

        if self.fluid is None or sent == self.problem.size:
            return np.zeros(len(edges_s))
        bound_s = self.fluid.of(sent, edges_s) - BOUND_SLACK * self.w
        return np.maximum.accumulate(bound_s)

    def _late_s(self, penalties: Any, end: int) -> Any:
        """Return the lowest delay of groups up to ``end`` that outlast the work.

        It is given by the group's start, from there on. All later groups then run
        after the work.
        """
        import numpy as np

        problem = self.problem
        idle = problem.levels[problem.best_idle].idle_s_per_byte
        starts = slice(end - penalties.shape[1], end)
        alone_s = problem.startup_s + idle * (self.total[end] - self.total[starts])
        return np.minimum(penalties.min(axis=0), alone_s) + self.after_s[end]

    def _fits(self, first: int, end: int) -> tuple[Any, Any]:
        """Return chunks that groups up to ``end`` need, and delays; by level, start."""
        import numpy as np

        problem = self.problem
        size_bytes = self.total[end] - self.total[first:end]
        needs, penalties = [], []
        for level in problem.levels:
            full_s = problem.startup_s + level.s_per_byte * size_bytes
            need = np.ceil(full_s * level.sigma / self.w - CHUNK_SLACK)
            needs.append(np.minimum(need, self.chunks + 1).astype(np.int64))
            penalties.append(full_s * (1.0 - level.sigma))
        return np.array(needs), np.array(penalties)

    def _last_edge(self, before: Any, rows: Any, end: int) -> tuple[float, int, int]:
        """Return the lowest delay at the last edge with a group up to ``end``.

        Also return its start's row and column in ``before`` and level as one index, and
        the level. ``before``: the delays of some ``rows``, columns from the first edge
        at which the group is ready.
        """
        import numpy as np

        problem = self.problem
        size_bytes = (self.total[end] - self.total[rows])[:, None]
        left = np.arange(before.shape[1] - 1, -1, -1.0) * self.w
        best, where, which = np.inf, -1, -1
        for j, level in enumerate(problem.levels):
            full_s = problem.startup_s + level.s_per_byte * size_bytes
            idle_s = level.idle_s_per_byte * size_bytes
            beside = left / level.sigma
            if problem.startup == "mixed":
                share = (problem.startup_s + idle_s) / np.maximum(full_s, 1e-300)
                added = share * (full_s - beside)
            else:
                added = np.maximum(0.0, problem.startup_s - beside)
                added = added + level.idle_s_per_byte / max(
                    level.s_per_byte, 1e-300
                ) * np.minimum(full_s - problem.startup_s, full_s - beside)
            added += beside - left
            fits = full_s * level.sigma <= left + CHUNK_SLACK * self.w
            added = np.where(fits, full_s * (1.0 - level.sigma), added)
            added += before
            i = int(added.argmin())
            if added.flat[i] < best:
                best, where, which = float(added.flat[i]), i, j
        return best, where, which

    def _traced(self, passes: list[Any]) -> Solution:
        """Return the groups that lead to the last edge of the last row."""
        import numpy as np

        one_pass = self.max_groups is None
        ends: list[int] = []
        levels: list[int] = []
        i, l, z = len(passes) - 1, self.problem.size, self.chunks  # noqa: E741
        delay_s = float(passes[i][l, z])
        while l:
            value = passes[i][l, z]
            source = passes[i if one_pass else i - 1]
            low, first = self.first_chunk[l - 1], self.problem.firsts[l - 1]
            if not one_pass and z >= low and source[l, z] <= value:
                i -= 1
                continue
            # The first edge of this delay: beyond it the step only waited.
            z = int(np.flatnonzero(passes[i][l] <= value)[0])
            if z == self.chunks:
                rows = np.arange(first, l)
                _, where, j = self._last_edge(source[first:l, low:], rows, l)
                before, column = divmod(where, self.chunks + 1 - low)
                start, z = before + first, column + low
            else:
                start, z, j = self._step_before(source, first, l, z)
            ends.append(l)
            levels.append(j)
            l = start  # noqa: E741
            i -= 0 if one_pass else 1
        return Solution(
            ends=tuple(reversed(ends)),
            levels=tuple(reversed(levels)),
            backward_s=self.problem.work_s + delay_s,
        )

    def _step_before(
        self, source: Any, first: int, end: int, z: int
    ) -> tuple[int, int, int]:
        """Return row, edge and level from which a delay inside the grid came."""
        import numpy as np

        needs, penalties = self._fits(first, end)
        start = z - needs
        reached = start >= self.first_chunk[end - 1]
        rows = np.arange(first, end)[None, :]
        value = np.where(
            reached, source[rows, np.maximum(start, 0)] + penalties, np.inf
        )
        j, row = divmod(int(value.argmin()), end - first)
        return row + first, int(start[j, row]), j
