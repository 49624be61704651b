"""LIBRA's problem without a grid: fronts of work done against delay."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.planners._libra.problem import Solution

if TYPE_CHECKING:
    from stretto.planners._libra.problem import LibraProblem

COARSE_RATIOS = (1e-2, 1e-4)
"""Slacks, over the work, of the rounds that find bounds for the last one."""


def solve_pareto(
    problem: LibraProblem,
    *,
    slack_s: float = 0.0,
    max_groups: int | None = None,
    incumbent: Solution | None = None,
) -> Solution:
    r"""The best groups and levels, each group starting as soon as it can.

    For every number of items sent a front of states $(s, D)$: the work done when the
    last message ends, and the delay that messages have caused. From there a group that
    is ready at $B$ starts at $s_0 = \max(s, B)$ and leads to $(s_0 + need, D + pen)$,
    or ends after the work, which closes the step. A state that is behind another in
    both, within ``slack_s`` in D, is dropped; so is one from which a fluid relaxation
    (`_Bound`) cannot beat the best known step. Coarse rounds find that step for the
    last one.

    Exact for ``slack_s`` 0, under LIBRA's assumption 3: no level delays more beside
    work than after it, $(a + p_r m)(1 - \sigma_r) \le a + q_r m$. Otherwise it costs at
    most ``slack_s`` per group. ``max_groups`` limits the number of groups.

    Raises:
        Infeasible: ``max_groups`` is below what types need.
    """
    problem.check_groups(max_groups)
    best = incumbent
    for ratio in COARSE_RATIOS:
        if ratio * problem.work_s > slack_s:
            best = _Round(problem, ratio * problem.work_s, max_groups, best).solved()
    return _Round(problem, slack_s, max_groups, best).solved()


class _Bound:
    r"""Least delay that unsent bytes can still cause.

    A byte sent at level $r$ beside work delays by $(1-\sigma_r) p_r$ and uses
    $\sigma_r p_r$ of it; after the work it delays by $\min q$. With M bytes and R of
    work left the fractional optimum is $M h(R / M)$ with $h$ the lower convex hull of
    those points; one more start-up costs at least $a \min(1 - \sigma)$.
    """

    def __init__(self, problem: LibraProblem) -> None:
        import numpy as np

        self.work_s = problem.work_s
        points = [(0.0, min(level.idle_s_per_byte for level in problem.levels))]
        points += sorted(
            (level.sigma * level.s_per_byte, (1 - level.sigma) * level.s_per_byte)
            for level in problem.levels
        )
        hull: list[tuple[float, float]] = []
        for x, y in points:
            if hull and y >= hull[-1][1]:
                continue
            while len(hull) > 1 and (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0]) <= (
                hull[-1][1] - hull[-2][1]
            ) * (x - hull[-2][0]):
                hull.pop()
            if hull and x <= hull[-1][0]:
                hull.pop()
            hull.append((x, y))
        # h as a maximum of lines M y0 + slope (R - M x0), the last one level.
        slopes = [
            (right[1] - left[1]) / (right[0] - left[0])
            for left, right in itertools.pairwise(hull)
        ]
        self.lines = [
            (y - slope * x, slope)
            for (x, y), slope in zip(hull, [*slopes, 0.0], strict=True)
        ]
        least = hull[-1][1]
        self.startup_s = problem.startup_s * min(1 - v.sigma for v in problem.levels)
        total = np.array(problem.total_bytes, dtype=float)
        self.left_bytes = total[-1] - total
        # What is ready late finds little work to hide beside, whatever comes before.
        late = self.fluid_s(
            self.left_bytes[:-1], self.work_s - np.array(problem.ready_s)
        )
        late = np.append(late + total[:-1] * least, total[-1] * least)
        suffix = np.maximum.accumulate(late[::-1])[::-1]
        self.late_s = suffix - total * least

    def fluid_s(self, size_bytes: Any, left_s: Any) -> Any:
        import numpy as np

        value: Any = None
        for per_byte, slope in self.lines:
            line = per_byte * size_bytes + slope * left_s
            value = line if value is None else np.maximum(value, line)
        return value

    def of(self, sent: Any, done_s: Any) -> Any:
        """For states with ``sent`` items sent and their next start at ``done_s``."""
        import numpy as np

        fluid_s = self.fluid_s(self.left_bytes[sent], self.work_s - done_s)
        return np.maximum(fluid_s, self.late_s[sent]) + self.startup_s


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
    ) -> None:
        self.problem = problem
        self.slack_s = slack_s
        self.max_groups = max_groups
        self.incumbent = incumbent
        self.limit_s = float("inf")
        if incumbent is not None:
            self.limit_s = incumbent.backward_s - problem.work_s - slack_s
        # Of each state ever kept: its parent, items sent and level of its last group.
        self.parents: list[Any] = []
        self.closing: tuple[int, int, int] | None = None

    def solved(self) -> Solution:
        import numpy as np

        problem = self.problem
        if not problem.size:
            return Solution(ends=(), levels=(), backward_s=problem.work_s)
        bound = _Bound(problem)
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

    def _fit_to_item(self, states: _States, end: int, bound: _Bound) -> _States:
        """The states that groups ending with an item, or later ones, may extend."""
        import numpy as np

        problem = self.problem
        ready_s = problem.ready_s[end - 1]
        mask = states.sent >= problem.firsts[end - 1]
        done_s = np.maximum(states.done_s, ready_s)
        mask &= states.delay_s + bound.of(states.sent, done_s) < self.limit_s
        states = states.kept(mask)
        states.done_s = np.maximum(states.done_s, ready_s)
        if self.max_groups is None:
            # Of those that wait for the item: the more is sent the better.
            waiting = np.flatnonzero(states.done_s <= ready_s)
            if len(waiting) > 1:
                order = waiting[
                    np.lexsort((states.delay_s[waiting], -states.sent[waiting]))
                ]
                delay_s = states.delay_s[order]
                least = np.minimum.accumulate(delay_s)
                behind = np.zeros(len(order), dtype=bool)
                behind[1:] = delay_s[1:] >= least[:-1]
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
        """Indices of the states that none is ahead of in both, within the slack."""
        import numpy as np

        order = np.lexsort((delay_s, done_s))
        delay = delay_s[order]
        least = np.minimum.accumulate(delay)
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = delay[1:] < least[:-1]
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
        """Takes the best step in which this group is the one that outlasts the work."""
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
        """Takes the best step whose last group ends within the work."""
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
