"""LIBRA's problem: whole buckets in sequence on one lane, each with a resource level.

LIBRA (Duan et al.) section III-B, Eq. 7-15. Times count from the start of backward;
*work* is backward's computation in seconds without communication.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from stretto.cost import (
    collective_cost,
    compute_rate,
    curve_bytes_per_s,
    flow_rates,
)
from stretto.errors import Infeasible, SpecError
from stretto.planners.base import dtype_starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Workload

STARTUPS = ("phase", "mixed")

CHUNK_SLACK = 1e-9
"""Fraction of a chunk by which work may fall short of an edge and still reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Behavior and cost of a collective at one level of resource."""

    resource: int | None

    sigma: float
    """Work done per second beside it: Eq. 5."""

    s_per_byte: float
    """Seconds per byte of the message while computation runs: p of Eq. 6."""

    idle_s_per_byte: float
    """Seconds per byte once computation has ended: q."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraProblem:
    r"""Items to be sent in contiguous groups, each at one level.

    An item is a tensor with bytes, or a whole bucket if the fusion is given. With
    start-up $a$, level $r$ and message $m$, communication that starts with remaining
    work $R$ takes $(a + p_r m)$ and uses $\sigma_r (a + p_r m)$ of the work if as much
    is left. Otherwise computation ends after $u = R / \sigma_r$, and the rest is sent
    alone. ``startup`` says how: ``mixed`` as Eq. 9-11, which spread the start-up
    evenly over the message, $(a + q_r m)(1 - u / (a + p_r m))$; ``phase`` as the
    simulator: first the start-up, then bytes.
    """

    ready_s: tuple[float, ...]
    """When each item is ready, ascending."""

    total_bytes: tuple[float, ...]
    """Bytes of the first ``l`` items, ``l`` from 0 to their number."""

    firsts: tuple[int, ...]
    """For each item, the first item with which it may share a group."""

    work_s: float

    startup_s: float

    levels: tuple[Level, ...]

    startup: str = "phase"

    def __post_init__(self) -> None:
        if self.startup not in STARTUPS:
            raise SpecError(
                f"startup must be one of {', '.join(STARTUPS)}, got {self.startup!r}",
                place=".startup",
            )

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ready_s)

    def alone_s(self, level: Level, begin_s: float, size_bytes: float) -> float:
        """Return the step's delay beyond its work if only this message remains.

        It starts when ``begin_s`` of the work is done, and nothing is sent after it.
        """
        full_s = self.startup_s + level.s_per_byte * size_bytes
        left_s = self.work_s - begin_s
        if full_s * level.sigma <= left_s:
            return full_s * (1.0 - level.sigma)
        beside_s = left_s / level.sigma
        return beside_s - left_s + self.residual_s(level, beside_s, size_bytes)

    def residual_s(self, level: Level, beside_s: float, size_bytes: float) -> float:
        """Return the time after computation of a message under way for ``beside_s``.

        Eq. 10, 11, or the start-up first and then bytes.
        """
        idle_s = level.idle_s_per_byte * size_bytes
        if self.startup == "mixed":
            full_s = self.startup_s + level.s_per_byte * size_bytes
            return (self.startup_s + idle_s) * (1.0 - beside_s / full_s)
        if beside_s <= self.startup_s:
            return self.startup_s - beside_s + idle_s
        sent = (beside_s - self.startup_s) / (level.s_per_byte * size_bytes)
        return idle_s * (1.0 - sent)

    def backward_s(self, ends: Sequence[int], levels: Sequence[int]) -> float:
        """Return the exact time of backward with its communication for these groups.

        Group ``i`` holds the items before ``ends[i]`` and has level ``levels[i]``. Each
        starts as soon as it is ready and the previous one has ended.
        """
        done_s = delay_s = after_s = 0.0
        begin = 0
        for end, index in zip(ends, levels, strict=True):
            level = self.levels[index]
            size_bytes = self.total_bytes[end] - self.total_bytes[begin]
            begin = end
            done_s = max(done_s, self.ready_s[end - 1])
            full_s = self.startup_s + level.s_per_byte * size_bytes
            if done_s >= self.work_s:
                after_s += self.startup_s + level.idle_s_per_byte * size_bytes
            elif full_s * level.sigma <= self.work_s - done_s:
                done_s += full_s * level.sigma
                delay_s += full_s * (1.0 - level.sigma)
            else:
                after_s = self.alone_s(level, done_s, size_bytes)
                done_s = self.work_s
        return self.work_s + delay_s + after_s

    @property
    def fewest_groups(self) -> int:
        """The smallest number of groups that types or a given fusion allow."""
        return len(self.after_work_ends(0))

    def after_work_ends(self, start: int) -> tuple[int, ...]:
        """Return ends of the fewest groups for items from ``start``, after all work."""
        ends: list[int] = []
        end = self.size
        while end > start:
            ends.append(end)
            end = max(start, self.firsts[end - 1])
        return tuple(reversed(ends))

    @property
    def best_idle(self) -> int:
        """The level that is fastest once all work is done."""
        rates = [level.idle_s_per_byte for level in self.levels]
        return rates.index(min(rates))

    def after_work_s(self) -> list[float]:
        """Return the time to send items from ``l`` on after all work, by ``l``."""
        per_byte = self.levels[self.best_idle].idle_s_per_byte
        groups = [0] * (self.size + 1)
        for start in range(self.size - 1, -1, -1):
            same = start + 1 < self.size and self.firsts[start + 1] <= start
            groups[start] = groups[start + 1] + (0 if same else 1)
        total = self.total_bytes
        return [
            count * self.startup_s + per_byte * (total[-1] - size_bytes)
            for count, size_bytes in zip(groups, total, strict=True)
        ]

    def check_groups(self, max_groups: int | None) -> None:
        """Require that a limit on groups can be met.

        Raises:
            Infeasible: naming the smallest possible limit.
        """
        if max_groups is not None and max_groups < self.fewest_groups:
            raise Infeasible(
                f"at most {max_groups} groups were allowed, but types alone make "
                f"{self.fewest_groups} necessary: allow as many"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Groups, their levels and the time of backward."""

    ends: tuple[int, ...]

    levels: tuple[int, ...]

    backward_s: float


def with_fewer_groups(
    problem: LibraProblem, solution: Solution, max_groups: int
) -> Solution:
    """Return the solution with neighbors merged, cheapest pair first."""
    best = solution
    while len(best.ends) > max_groups:
        ends, levels = best.ends, best.levels
        merged = [
            (
                (*ends[:i], *ends[i + 1 :]),
                (*levels[:i], level, *levels[i + 2 :]),
            )
            for i in range(len(ends) - 1)
            if problem.firsts[ends[i + 1] - 1] <= (ends[i - 1] if i else 0)
            for level in dict.fromkeys(levels[i : i + 2])
        ]
        best = min(
            (
                Solution(ends=e, levels=v, backward_s=problem.backward_s(e, v))
                for e, v in merged
            ),
            key=lambda found: found.backward_s,
        )
    return best


def levels_of(
    cluster: Cluster, resources: Sequence[int] | None = None
) -> tuple[Level, ...]:
    """Return each resource level's costs on a cluster, as the simulator has them.

    ``resources`` restricts the cluster's levels. Without contention there is one level,
    which does not slow computation.

    Raises:
        SpecError: the cluster does not list one of ``resources``.
    """
    contention = cluster.contention
    rate = flow_rates(cluster).per_flow_bytes_per_s(1)
    factor = collective_cost(cluster).wire_factor if cluster.ranks > 1 else 0.0
    if contention is None or cluster.ranks == 1:
        alone = factor / rate
        return (
            Level(resource=None, sigma=1.0, s_per_byte=alone, idle_s_per_byte=alone),
        )
    chosen = contention.resources if resources is None else tuple(resources)
    for resource in chosen:
        if resource not in contention.resources:
            known = ", ".join(map(str, contention.resources))
            raise SpecError(
                f"resources must be among the cluster's levels ({known}), "
                f"got {resource}",
                place=".resources",
            )
    return tuple(
        Level(
            resource=resource,
            sigma=compute_rate(contention.compute, resource),
            s_per_byte=factor
            / min(rate, curve_bytes_per_s(contention.overlapped, resource)),
            idle_s_per_byte=factor
            / min(rate, curve_bytes_per_s(contention.exclusive, resource)),
        )
        for resource in chosen
    )


def problem_of(
    workload: Workload,
    cluster: Cluster,
    *,
    startup: str = "phase",
    resources: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
) -> tuple[LibraProblem, tuple[int, ...]]:
    """Return the problem, and for each item the index of its last tensor with bytes.

    ``ends``: a given fusion; its buckets are then the items and stay apart. Tensors
    and buckets without bytes are not items.
    """
    tensors = workload.tensors
    so_far = tuple(accumulate((tensor.bytes for tensor in tensors), initial=0))
    sent = [i for i, tensor in enumerate(tensors) if tensor.bytes]
    if ends is None:
        starts = dtype_starts(workload)
        lasts = sent
        ready = [tensors[i].ready_s for i in sent]
        firsts = [bisect_left(sent, starts[i]) for i in sent]
    else:
        bounds = list(zip((0, *ends[:-1]), ends, strict=True))
        full = [(b, e) for b, e in bounds if so_far[e] > so_far[b]]
        lasts = [sent[bisect_left(sent, end) - 1] for _, end in full]
        ready = [tensors[end - 1].ready_s for _, end in full]
        firsts = list(range(len(full)))
    problem = LibraProblem(
        ready_s=tuple(ready),
        total_bytes=(0, *(so_far[last + 1] for last in lasts)),
        firsts=tuple(firsts),
        work_s=workload.backward_s,
        startup_s=collective_cost(cluster).startup_s if cluster.ranks > 1 else 0.0,
        levels=levels_of(cluster, resources),
        startup=startup,
    )
    return problem, tuple(lasts)


def first_chunk(ready_s: float, chunk_s: float, chunks: int) -> int:
    """Return the first edge at which an item is ready (lines 17-21).

    As printed, the search starts at 1, compares products of floats and may pass the
    last edge: with ``[0.9]`` in 3 chunks, ``3 * w`` is below 0.9.
    """
    if chunk_s == 0:
        return 0
    return min(chunks, max(0, math.ceil(ready_s / chunk_s - CHUNK_SLACK)))
