"""Plans for graphs whose branches cross one another.

Such a graph is cut where all its paths meet. A part between two cuts that is not
series-parallel becomes one layer, with the cut at its end, so that all of it gets the
same GPUs. The exact search plans the result. Then the joined layers may differ again:
each takes the width with the smallest sum, until none improves. If there are few enough
combinations, all are tried and the plan is exact among those in which branches take
turns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.planners.burst.cuts import expanded, joined
from stretto.planners.burst.evaluate import in_turns
from stretto.planners.burst.problem import Choice
from stretto.planners.burst.search import shortest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.planners.burst.problem import BurstProblem

MAX_TRIED = 20_000
"""All combinations of widths are tried up to this number."""


def shortest_crossing(problem: BurstProblem) -> tuple[float, Choice] | None:
    """Return time and choice of a fast plan, ``None`` if none was found in the limit.

    Never slower than the fastest with equal widths between two cuts. Exact, with
    branches in turns, up to `MAX_TRIED` combinations.
    """
    count, widths = len(problem.profile.layers), len(problem.widths)
    if widths**count <= MAX_TRIED:
        return _best(problem, itertools.product(range(widths), repeat=count))
    whole, groups = joined(problem.profile)
    found = shortest(replace(problem, profile=whole))
    if found is None:
        return None
    choice = expanded(found[1], groups)
    if choice.own:
        # Branches that run beside others are unchanged; their sum is not in turns.
        return found[0], choice
    return _improved(problem, choice.widths)


def _best(
    problem: BurstProblem, candidates: Iterable[Sequence[int]]
) -> tuple[float, Choice] | None:
    best: tuple[float, Choice] | None = None
    for widths in candidates:
        choice = Choice(widths=tuple(widths))
        cost = in_turns(problem, choice)
        limit = problem.amplification_limit
        if limit is not None and cost.max_amplification > limit * (1 + 1e-9):
            continue
        if best is None or cost.iteration_s < best[0]:
            best = (cost.iteration_s, choice)
    return best


def _improved(
    problem: BurstProblem, widths: tuple[int, ...]
) -> tuple[float, Choice] | None:
    """Set one layer after another to its best width, until none improves."""
    best = _best(problem, [widths])
    while best is not None:
        before_s, at = best[0], best[1].widths
        for i in range(len(at)):
            tried = [(*at[:i], k, *at[i + 1 :]) for k in range(len(problem.widths))]
            found = _best(problem, [at, *tried])
            if found is not None and found[0] < best[0]:
                best, at = found, found[1].widths
        if best[0] >= before_s * (1 - 1e-12):
            break
    return best
