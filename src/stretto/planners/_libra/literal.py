"""LIBRA's Algorithm 1 as printed, errors fixed: ``search="literal"``.

It is also the reference for tests of `stretto.planners._libra.grid`, with which it
shares only `problem`.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from stretto.planners._libra.problem import CHUNK_SLACK, Solution, first_chunk

if TYPE_CHECKING:
    from stretto.planners._libra.problem import LibraProblem


def solve_literal(problem: LibraProblem, *, max_groups: int, chunks: int) -> Solution:
    r"""Return the optimum of Eq. 23 on a grid of ``chunks``, in $O(K L^2 Z^2 J)$.

    Fixed: line 24 tests $t_c > 0$, which is exactly 0 where the message fits;
    $T[0][0][z] = z w$ and $T[0][l > 0] = \infty$. $l' = l$ (an empty group) is kept,
    because it makes K an upper limit. The problem defines the start-up.
    """
    problem.check_groups(max_groups)
    inf = math.inf
    size, work_s = problem.size, problem.work_s
    w = work_s / chunks
    total = problem.total_bytes
    best = [[z * w for z in range(chunks + 1)]]
    best += [[inf] * (chunks + 1) for _ in range(size)]
    log: list[dict[tuple[int, int], tuple[int, int, int]]] = []
    for _ in range(max_groups):
        new = [[inf] * (chunks + 1) for _ in range(size + 1)]
        hops: dict[tuple[int, int], tuple[int, int, int]] = {}
        for l, z in itertools.product(range(1, size + 1), range(chunks + 1)):  # noqa: E741
            z_min = first_chunk(problem.ready_s[l - 1], w, chunks)
            for before, z_from, j in itertools.product(
                range(problem.firsts[l - 1], l + 1),
                range(z_min, z + 1),
                range(len(problem.levels)),
            ):
                size_bytes = total[l] - total[before]
                h = stage_s(problem, size_bytes, z, z_from, j, chunks)
                if best[before][z_from] + h < new[l][z]:
                    new[l][z] = best[before][z_from] + h
                    hops[l, z] = (before, z_from, j)
        best = new
        log.append(hops)
    ends: list[int] = []
    levels: list[int] = []
    l, z = size, chunks  # noqa: E741
    for hops in reversed(log):
        if l == 0:
            break
        before, z_from, j = hops[l, z]
        if before < l:
            ends.append(l)
            levels.append(j)
        l, z = before, z_from  # noqa: E741
    return Solution(
        ends=tuple(reversed(ends)),
        levels=tuple(reversed(levels)),
        backward_s=best[size][chunks],
    )


def stage_s(
    problem: LibraProblem, size_bytes: float, z: int, z_from: int, j: int, chunks: int
) -> float:
    """Return the stage time h of Eq. 19.

    It is the time of a message beside the chunks from one edge to another.
    """
    w = problem.work_s / chunks
    chunk_s = (z - z_from) * w
    if not size_bytes:
        return chunk_s
    level = problem.levels[j]
    full_s = problem.startup_s + level.s_per_byte * size_bytes
    need_s = full_s * level.sigma
    if need_s <= chunk_s + CHUNK_SLACK * w:
        return full_s + max(0.0, chunk_s - need_s)  # t_o + t_b
    if z < chunks:
        return math.inf
    beside_s = chunk_s / level.sigma
    return beside_s + problem.residual_s(level, beside_s, size_bytes)  # t_o + t_c
