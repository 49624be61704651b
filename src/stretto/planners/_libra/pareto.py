"""LIBRA's problem without a grid: fronts of work done against delay."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stretto.planners._libra.bound import FluidBound, GridBound
from stretto.planners._libra.grid import solve_grid
from stretto.planners._libra.problem import Solution, with_fewer_groups

if TYPE_CHECKING:
    from stretto.planners._libra.problem import LibraProblem

RATIOS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Slacks of the rounds, relative to the work."""

CANDIDATES = 8_000_000
"""States that one round may examine if no slack is requested: about a second. A budget
that does not depend on the machine, so that the plan does not either."""

FIRST_CHUNKS = 150
"""Chunks of the grid that finds a first step if groups are limited."""

GRID_CHUNKS = 400
GRID_FROM = 20
"""Edges of a `GridBound`, and the number of items from which it pays off."""

_GROWTH = 5.0
"""Assumed ratio of a round's states to the previous one's, at a tenth of its slack."""


def solve_pareto(
    problem: LibraProblem,
    *,
    slack_s: float | None = None,
    max_groups: int | None = None,
) -> Solution:
    r"""Return the best groups and levels, each group starting as soon as it can.

    Every number of items sent has a front of states $(s, D)$: the work done when the
    last message ends, and the delay that messages have caused. From there a group that
    is ready at $B$ starts at $s_0 = \max(s, B)$ and leads to $(s_0 + need, D + pen)$,
    or ends after the work, which closes the step. A state is dropped if another is
    better in both, within ``slack_s`` in D, or if its bound (`FluidBound`,
    `GridBound`) cannot beat the best known step. Rounds of decreasing slack find that
    step, first without cuts between items that are ready at once, then with them.

    Exact for ``slack_s`` 0, under LIBRA's assumption 3: no level delays more beside
    work than after it, $(a + p_r m)(1 - \sigma_r) \le a + q_r m$. Otherwise it costs at
    most ``slack_s`` per group. ``None``: as little as a budget of states allows.
    ``max_groups`` limits the number of groups.

    Raises:
        Infeasible: ``max_groups`` is below the number that types require.
    """
    problem.check_groups(max_groups)
    incumbent: Solution | None = None
    if max_groups is not None:
        free = solve_pareto(problem, slack_s=slack_s)
        if len(free.ends) <= max_groups:
            return free
        incumbent = with_fewer_groups(problem, free, max_groups)
        on_grid = solve_grid(problem, chunks=FIRST_CHUNKS, max_groups=max_groups)
        off_grid_s = problem.backward_s(on_grid.ends, on_grid.levels)
        if off_grid_s < incumbent.backward_s:
            incumbent = replace(on_grid, backward_s=off_grid_s)
    fewer, item_ends = _merged(problem)
    if fewer.size == problem.size:
        return _solve_by_rounds(problem, slack_s, max_groups, incumbent)[0]
    best, looked = _solve_by_rounds(fewer, slack_s, max_groups, None)
    best = Solution(
        ends=tuple(item_ends[end - 1] for end in best.ends),
        levels=best.levels,
        backward_s=best.backward_s,
    )
    if incumbent is not None and incumbent.backward_s < best.backward_s:
        best = incumbent
    if slack_s is None:
        more = (problem.size / fewer.size) ** 2
        fit = [ratio for ratio, count in looked.items() if count * more <= CANDIDATES]
        slack_s = min(fit, default=RATIOS[0]) * problem.work_s
    bound = _bound(problem, best)
    return _Round(problem, slack_s, max_groups, best, bound).solved()


def _merged(problem: LibraProblem) -> tuple[LibraProblem, tuple[int, ...]]:
    """Merge items that are ready at once; return the problem and their ends."""
    ready_s, firsts = problem.ready_s, problem.firsts
    ends = tuple(
        i
        for i in range(1, problem.size + 1)
        if i == problem.size
        or ready_s[i] > ready_s[i - 1]
        or firsts[i] != firsts[i - 1]
    )
    begins = (0, *ends[:-1])
    merged = replace(
        problem,
        ready_s=tuple(ready_s[end - 1] for end in ends),
        total_bytes=(0, *(problem.total_bytes[end] for end in ends)),
        firsts=tuple(bisect_left(begins, firsts[end - 1]) for end in ends),
    )
    return merged, ends


def _solve_by_rounds(
    problem: LibraProblem,
    slack_s: float | None,
    max_groups: int | None,
    best: Solution | None,
) -> tuple[Solution, dict[float, int]]:
    """Return the result of rounds of falling slack, and the states each examined."""
    looked: dict[float, int] = {}
    bound = FluidBound(problem) if best is None else _bound(problem, best)
    for ratio in RATIOS if slack_s is None else RATIOS[:2]:
        if slack_s is not None and ratio * problem.work_s <= slack_s:
            continue
        # The first round has no bound yet and does not predict the second.
        growth = 1.0 if len(looked) == 1 and max_groups is None else _GROWTH
        if looked and growth * list(looked.values())[-1] > CANDIDATES:
            break
        search = _Round(problem, ratio * problem.work_s, max_groups, best, bound)
        if best is None:
            best = search.solved()
            bound = _bound(problem, best)
        else:
            best = search.solved()
        looked[ratio] = search.looked
    if slack_s is not None:
        best = _Round(problem, slack_s, max_groups, best, bound).solved()
    assert best is not None  # noqa: S101
    return best, looked


def _bound(problem: LibraProblem, best: Solution) -> FluidBound | GridBound:
    fluid = FluidBound(problem)
    if problem.size < GRID_FROM:
        return fluid
    limit_s = best.backward_s - problem.work_s
    return GridBound(problem, fluid, GRID_CHUNKS, limit_s)


@dataclass(slots=True)
class _States:
    """States that may still be extended, as arrays."""

    done_s: Any
    delay_s: Any
    sent: Any
    groups: Any
    label: Any

    def kept(self, mask: Any) -> _States:
        return _States(
            self.done_s[mask],
            self.delay_s[mask],
            self.sent[mask],
            self.groups[mask],
            self.label[mask],
        )


class _Round:
    """One pass over the items at one slack."""

    def __init__(
        self,
        problem: LibraProblem,
        slack_s: float,
        max_groups: int | None,
        incumbent: Solution | None,
        bound: FluidBound | GridBound,
    ) -> None:
        self.problem = problem
        self.bound = bound
        self.slack_s = slack_s
        self.looked = 0
        self.max_groups = max_groups
        self.incumbent = incumbent
        self.limit_s = float("inf")
        if incumbent is not None:
            self.limit_s = incumbent.backward_s - problem.work_s
        # Of each state ever kept: its parent, items sent and level of its last group.
        self.parents: list[Any] = []
        self.closing: tuple[int, int, int] | None = None

    def solved(self) -> Solution:
        import numpy as np

        problem = self.problem
        if not problem.size:
            return Solution(ends=(), levels=(), backward_s=problem.work_s)
        bound = self.bound
        after_s = problem.after_work_s()
        groups_after = self._groups_after()
        total = np.array(problem.total_bytes, dtype=float)
        none = np.zeros(1)
        zero = np.zeros(1, dtype=np.int64)
        states = _States(none, none, zero, zero, zero)
        self.parents.append((zero - 1, zero, zero))
        count = 1
        for l in range(1, problem.size + 1):  # noqa: E741
            states = self._fit_to_item(states, l, bound)
            self.looked += len(states.sent) * len(problem.levels)
            size_bytes = total[l] - total[states.sent]
            fresh: list[_States] = []
            fresh_levels: list[Any] = []
            for j, level in enumerate(problem.levels):
                full_s = problem.startup_s + level.s_per_byte * size_bytes
                done_s = states.done_s + full_s * level.sigma
                delay_s = states.delay_s + full_s * (1.0 - level.sigma)
                fits = done_s <= problem.work_s
                if self.max_groups is not None:
                    allowed = states.groups + 1 + groups_after[l] <= self.max_groups
                else:
                    allowed = np.ones(len(fits), dtype=bool)
                self._close(states, size_bytes, allowed, ~fits, l, j, after_s[l])
                if l == problem.size:
                    self._end(states, delay_s, fits & allowed, l, j)
                    continue
                begin_s = np.maximum(done_s, problem.ready_s[l])
                sent = np.full(len(fits), l)
                promising = (
                    fits & allowed & (delay_s + bound.of(sent, begin_s) < self.limit_s)
                )
                fresh.append(
                    _States(
                        done_s, delay_s, sent, states.groups + 1, states.label
                    ).kept(promising)
                )
                fresh_levels.append(np.full(int(promising.sum()), j))
            if not fresh:
                break
            front, parents, levels = self._front(fresh, fresh_levels)
            number = len(parents)
            front.label = np.arange(count, count + number)
            count += number
            self.parents.append((parents, front.sent, levels))
            states = _States(
                *(
                    np.concatenate((getattr(states, name), getattr(front, name)))
                    for name in ("done_s", "delay_s", "sent", "groups", "label")
                )
            )
        return self._solution()

    def _groups_after(self) -> list[int]:
        problem = self.problem
        groups = [0] * (problem.size + 1)
        for start in range(problem.size - 1, -1, -1):
            same = start + 1 < problem.size and problem.firsts[start + 1] <= start
            groups[start] = groups[start + 1] + (0 if same else 1)
        return groups

    def _fit_to_item(
        self, states: _States, end: int, bound: FluidBound | GridBound
    ) -> _States:
        """Return the states that groups ending with an item, or later, may extend."""
        import numpy as np

        problem = self.problem
        ready_s = problem.ready_s[end - 1]
        mask = states.sent >= problem.firsts[end - 1]
        done_s = np.maximum(states.done_s, ready_s)
        mask &= states.delay_s + bound.of(states.sent, done_s) < self.limit_s
        states = states.kept(mask)
        states.done_s = np.maximum(states.done_s, ready_s)
        if self.max_groups is None:
            # Of the states that wait for the item, more items sent is better.
            waiting = np.flatnonzero(states.done_s <= ready_s)
            if len(waiting) > 1:
                order = waiting[
                    np.lexsort((states.delay_s[waiting], -states.sent[waiting]))
                ]
                delay_s = states.delay_s[order]
                lowest = np.minimum.accumulate(delay_s)
                behind = np.zeros(len(order), dtype=bool)
                behind[1:] = delay_s[1:] >= lowest[:-1]
                mask = np.ones(len(states.sent), dtype=bool)
                mask[order[behind]] = False
                states = states.kept(mask)
        return states

    def _front(
        self, fresh: list[_States], fresh_levels: list[Any]
    ) -> tuple[_States, Any, Any]:
        import numpy as np

        every = _States(
            *(
                np.concatenate([getattr(part, name) for part in fresh])
                for name in ("done_s", "delay_s", "sent", "groups", "label")
            )
        )
        levels = np.concatenate(fresh_levels)
        if self.max_groups is None:
            keep = self._undominated(every.done_s, every.delay_s)
        else:
            keep = np.concatenate(
                [
                    chosen[
                        self._undominated(every.done_s[chosen], every.delay_s[chosen])
                    ]
                    for chosen in (
                        np.flatnonzero(every.groups == number)
                        for number in np.unique(every.groups)
                    )
                ]
                or [np.zeros(0, dtype=np.int64)]
            )
        front = every.kept(keep)
        return front, front.label, levels[keep]

    def _undominated(self, done_s: Any, delay_s: Any) -> Any:
        """Return indices of states that no other beats in both, within the slack."""
        import numpy as np

        order = np.lexsort((delay_s, done_s))
        delay = delay_s[order]
        lowest = np.minimum.accumulate(delay)
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = delay[1:] < lowest[:-1]
        order = order[keep]
        if self.slack_s and len(order) > 1:
            # One of each band of delay: the first, so the one with the least work.
            bands = np.floor(delay_s[order] / self.slack_s)
            keep = np.ones(len(order), dtype=bool)
            keep[1:] = bands[1:] != bands[:-1]
            order = order[keep]
        return order

    def _close(
        self,
        states: _States,
        size_bytes: Any,
        allowed: Any,
        late: Any,
        end: int,
        j: int,
        after_s: float,
    ) -> None:
        """Keep the best step in which this group is the one that outlasts the work."""
        import numpy as np

        chosen = np.flatnonzero(late & allowed)
        if not len(chosen):
            return
        problem, level = self.problem, self.problem.levels[j]
        size_bytes = size_bytes[chosen]
        left_s = problem.work_s - states.done_s[chosen]
        beside_s = left_s / level.sigma
        idle_s = level.idle_s_per_byte * size_bytes
        full_s = problem.startup_s + level.s_per_byte * size_bytes
        if problem.startup == "mixed":
            rest_s = (problem.startup_s + idle_s) * (1.0 - beside_s / full_s)
        else:
            sent = np.maximum(0.0, beside_s - problem.startup_s)
            sent /= np.maximum(full_s - problem.startup_s, 1e-300)
            rest_s = np.maximum(0.0, problem.startup_s - beside_s)
            rest_s += idle_s * (1.0 - sent)
        value = states.delay_s[chosen] + beside_s - left_s + rest_s + after_s
        self._take(states, value, chosen, end, j)

    def _end(self, states: _States, delay_s: Any, ends: Any, end: int, j: int) -> None:
        """Keep the best step whose last group ends within the work."""
        import numpy as np

        chosen = np.flatnonzero(ends)
        if len(chosen):
            self._take(states, delay_s[chosen], chosen, end, j)

    def _take(self, states: _States, value: Any, chosen: Any, end: int, j: int) -> None:
        i = int(value.argmin())
        if value[i] < self.limit_s:
            self.limit_s = float(value[i])
            self.closing = (int(states.label[chosen[i]]), end, j)

    def _solution(self) -> Solution:
        import numpy as np

        problem = self.problem
        if self.closing is None:
            assert self.incumbent is not None  # noqa: S101
            return self.incumbent
        label, end, j = self.closing
        after = problem.after_work_ends(end)
        ends, levels = [end], [j]
        parents, sent, used = (
            np.concatenate(part) for part in zip(*self.parents, strict=True)
        )
        while label > 0:
            ends.append(int(sent[label]))
            levels.append(int(used[label]))
            label = int(parents[label])
        all_ends = (*reversed(ends), *after)
        all_levels = (*reversed(levels), *[problem.best_idle] * len(after))
        return Solution(
            ends=all_ends,
            levels=all_levels,
            backward_s=problem.backward_s(all_ends, all_levels),
        )
