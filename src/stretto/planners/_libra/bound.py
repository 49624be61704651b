"""Lower bounds on the delay that unsent bytes will cause."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.planners._libra.problem import LibraProblem


class FluidBound:
    r"""Lowest delay that unsent bytes can still cause.

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
        lowest = hull[-1][1]
        self.startup_s = problem.startup_s * min(1 - v.sigma for v in problem.levels)
        total = np.array(problem.total_bytes, dtype=float)
        self.left_bytes = total[-1] - total
        # Late items find little work to hide beside, whatever comes before.
        late = self.fluid_s(
            self.left_bytes[:-1], self.work_s - np.array(problem.ready_s)
        )
        late = np.append(late + total[:-1] * lowest, total[-1] * lowest)
        suffix = np.maximum.accumulate(late[::-1])[::-1]
        self.late_s = suffix - total * lowest

    def fluid_s(self, size_bytes: Any, left_s: Any) -> Any:
        import numpy as np

        value: Any = None
        for per_byte, slope in self.lines:
            line = per_byte * size_bytes + slope * left_s
            value = line if value is None else np.maximum(value, line)
        return value

    def of(self, sent: Any, done_s: Any) -> Any:
        """Return bounds with ``sent`` items sent and the next start at ``done_s``."""
        import numpy as np

        fluid_s = self.fluid_s(self.left_bytes[sent], self.work_s - done_s)
        return np.maximum(fluid_s, self.late_s[sent]) + self.startup_s


class GridBound:
    r"""The dynamic program run backward on a grid that rounds in the plan's favor.

    ``table[l, z]`` bounds the delay that items from ``l`` on still cause once at least
    ``z`` chunks of work are done: a message that is ready at $B$ starts at
    $s = \max(z w, B)$ and ends, if it fits, with $\lfloor (s + need) / w \rfloor$
    chunks done. One that outlasts the work by $x$ of it adds at least
    $x (\min(q / p, 1) - 1 + \sigma) / \sigma$ more. Unlike `FluidBound` it counts
    start-ups, and that gradients are sent in order. Entries beyond ``limit_s`` may be
    infinite.
    """

    def __init__(
        self, problem: LibraProblem, fluid: FluidBound, chunks: int, limit_s: float
    ) -> None:
        import numpy as np

        self.fluid = fluid
        size, work_s = problem.size, problem.work_s
        self.chunks, self.w = chunks, work_s / chunks
        w = self.w
        total = np.array(problem.total_bytes, dtype=float)
        ready = np.array(problem.ready_s)
        after = np.array(problem.after_work_s())
        ready_edge = ready / w
        table = np.zeros((size + 1, chunks + 1))
        # By level: the edges, then padding for messages that outlast the work.
        apron = np.arange(chunks + 3) * w
        padded = np.zeros((len(problem.levels), size + 1, 2 * chunks + 3))
        slopes = np.array(
            [
                max(
                    0.0,
                    min(
                        level.idle_s_per_byte / level.s_per_byte
                        if level.s_per_byte
                        else 1.0,
                        1.0,
                    )
                    - 1.0
                    + level.sigma,
                )
                / level.sigma
                for level in problem.levels
            ]
        )
        padded[:, :, chunks + 1 :] = slopes[:, None, None] * apron[1:] + after[:, None]
        windows = np.lib.stride_tricks.sliding_window_view(padded, chunks + 1, axis=2)
        last = size
        for l in range(size - 1, -1, -1):  # noqa: E741
            while problem.firsts[last - 1] > l:
                last -= 1
            ends = np.arange(l + 1, last + 1)
            size_bytes = total[ends] - total[l]
            row = np.full(chunks + 1, np.inf)
            for j, level in enumerate(problem.levels):
                full_s = problem.startup_s + level.s_per_byte * size_bytes
                need = full_s * level.sigma / w
                delay_s = full_s * (1.0 - level.sigma)
                steps = np.maximum(need - _SLACK, 0.0)
                shift = np.minimum(steps, chunks + 1).astype(np.int64)
                edge = np.minimum(ready_edge[ends - 1] + steps, 2 * chunks + 1)
                lowest = padded[j, ends, edge.astype(np.int64)]
                near = np.flatnonzero(delay_s + lowest < limit_s)
                if len(near):
                    value = windows[j, ends[near], shift[near]]
                    np.maximum(value, lowest[near, None], out=value)
                    value += delay_s[near, None]
                    np.minimum(row, value.min(axis=0), out=row)
            row[chunks] = after[l]
            np.maximum.accumulate(row, out=row)
            table[l] = row
            padded[:, l, : chunks + 1] = row
        self.table = table

    def of(self, sent: Any, done_s: Any) -> Any:
        """Return bounds with ``sent`` items sent and the next start at ``done_s``."""
        import numpy as np

        edge = np.clip(done_s / self.w - _SLACK, 0.0, self.chunks).astype(np.int64)
        return np.maximum(self.table[sent, edge], self.fluid.of(sent, done_s))


_SLACK = 1e-9
"""Chunks of tolerance for rounding."""
