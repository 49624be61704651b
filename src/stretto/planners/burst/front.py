"""Pareto front of step time against GPU time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import numpy as np

from stretto.planners.burst.edges import EdgeCost, min_plus
from stretto.planners.burst.evaluate import Cost, evaluate
from stretto.planners.burst.problem import Choice
from stretto.planners.burst.search import shortest
from stretto.planners.burst.tree import Block, Chain, Edge

if TYPE_CHECKING:
    from stretto.planners.burst.problem import BurstProblem, Floats


def front(problem: BurstProblem) -> list[tuple[Cost, Choice]]:
    """Return plans on the lower convex hull of time and GPU time, the fastest first.

    Each minimizes time + price * GPU time for some price per second of a GPU; with
    branches in turns that is a shortest path, so each is exact. Plans above the hull
    are left out: alternating between two of its plans, step by step, does better. The
    fastest plan may have branches on their own GPUs and comes from `shortest`.

    Computes one shortest path for each plan and one for each pair of neighbors.
    """
    fastest = shortest(problem)
    if fastest is None:
        return []
    first = _best_of(problem, 0.0)
    last = _best_of(problem, math.inf)
    found = [first, *_between(problem, first, last), last]
    plans = [(evaluate(problem, choice), choice) for choice in (fastest[1],)]
    plans += sorted(found, key=lambda plan: (plan[0].iteration_s, plan[0].gpu_s))
    return _hull(plans)


def _best_of(problem: BurstProblem, price: float) -> tuple[Cost, Choice]:
    choice = _Priced(problem, price).solve()
    return evaluate(problem, choice), choice


def _between(
    problem: BurstProblem, fast: tuple[Cost, Choice], slow: tuple[Cost, Choice]
) -> list[tuple[Cost, Choice]]:
    """Return the plans of the hull between two of its plans, by time."""
    found: list[tuple[Cost, Choice]] = []
    work = [(fast, slow)]
    while work:
        left, right = work.pop()
        saved_s = left[0].gpu_s - right[0].gpu_s
        lost_s = right[0].iteration_s - left[0].iteration_s
        if saved_s <= 1e-9 * left[0].gpu_s or lost_s <= 1e-9 * left[0].iteration_s:
            continue
        price = lost_s / saved_s
        middle = _best_of(problem, price)
        value_s = middle[0].iteration_s + price * middle[0].gpu_s
        line_s = left[0].iteration_s + price * left[0].gpu_s
        if value_s < line_s * (1 - 1e-9):
            found.append(middle)
            work += [(left, middle), (middle, right)]
    return found


def _hull(plans: list[tuple[Cost, Choice]]) -> list[tuple[Cost, Choice]]:
    """Return the lower convex hull, without plans that another beats in both."""
    plans = sorted(plans, key=lambda plan: (plan[0].iteration_s, plan[0].gpu_s))
    kept: list[tuple[Cost, Choice]] = []
    for plan in plans:
        x, y = plan[0].iteration_s, plan[0].gpu_s
        if kept and y >= kept[-1][0].gpu_s * (1 - 1e-12):
            continue
        while len(kept) > 1:
            (one, _), (two, _) = kept[-2:]
            turn = (two.iteration_s - one.iteration_s) * (y - one.gpu_s)
            turn -= (two.gpu_s - one.gpu_s) * (x - one.iteration_s)
            if turn > 0:
                break
            kept.pop()
        kept.append(plan)
    return kept


@final
class _Priced:
    """The choice of lowest time + price * GPU time, branches in turns.

    An infinite price minimizes GPU time. ``_rate`` is the weight of a second at each
    width; all costs are products with it.
    """

    def __init__(self, problem: BurstProblem, price: float) -> None:
        self._problem = problem
        widths = np.array(problem.widths, float)
        # A small weight of the other cost breaks ties: no plan found is worse in both.
        self._rate = (
            widths + 1e-9 if math.isinf(price) else 1 + max(price, 1e-12) * widths
        )
        self._node_s = problem.node_s * self._rate
        self._tables: dict[int, Floats] = {}
        self._at = [0] * len(problem.profile.layers)

    def solve(self) -> Choice:
        problem, tree = self._problem, self._problem.tree
        allowed = problem.slack_s[tree.source] >= 0
        start_s = np.where(allowed, self._node_s[tree.source], np.inf)
        if tree.chain is None:
            return Choice(widths=(int(start_s.argmin()),))
        times = self._times(tree.chain, start_s[None, :])
        tail = int((times[-1][0] + self._node_s[tree.target]).argmin())
        self._at[tree.target] = tail
        head = self._place(tree.chain, times, tail, start_s)
        self._at[tree.source] = head
        return Choice(widths=tuple(self._at))

    def _times(self, chain: Chain, start_rh: Floats) -> list[Floats]:
        """Return times after each link, with each layer's own except the last's."""
        times = []
        for i, link in enumerate(chain.links):
            start_rh = min_plus(start_rh, self._table(link))
            if i < len(chain.nodes):
                start_rh = start_rh + self._node_s[chain.nodes[i]]
            times.append(start_rh)
        return times

    def _table(self, link: Edge | Block) -> Floats:
        key = id(link)
        if key not in self._tables:
            if isinstance(link, Edge):
                cost = EdgeCost(self._problem, link.source, link.target, moved=False)
                self._tables[key] = cost.dense_hk * self._rate
            else:
                total_hk: Floats = np.zeros((len(self._rate), len(self._rate)))
                for branch in link.branches:
                    total_hk = total_hk + self._through(branch)
                self._tables[key] = total_hk
        return self._tables[key]

    def _through(self, chain: Chain) -> Floats:
        """Return costs between the widths before and after a chain."""
        through_hk = self._table(chain.links[0])
        for node, link in zip(chain.nodes, chain.links[1:], strict=True):
            through_hk = min_plus(through_hk + self._node_s[node], self._table(link))
        return through_hk

    def _place(
        self, chain: Chain, times: list[Floats], tail: int, start_s: Floats
    ) -> int:
        """Return the width before a chain; record those of its layers."""
        for i in reversed(range(len(chain.links))):
            before_h = times[i - 1][0] if i else start_s
            head = int((before_h + self._table(chain.links[i])[:, tail]).argmin())
            link = chain.links[i]
            if isinstance(link, Block):
                alone = np.full(len(self._rate), np.inf)
                alone[head] = 0.0
                for branch in link.branches:
                    if branch.nodes:
                        inner = self._times(branch, alone[None, :])
                        self._place(branch, inner, tail, alone)
            if i:
                self._at[chain.nodes[i - 1]] = head
            tail = head
        return tail
