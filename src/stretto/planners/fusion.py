"""Sequential tensor fusion, exactly."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    LinearCost,
    dtype_starts,
    finish,
    linear_cost,
)
from stretto.schema import Workload

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan


@final
class FusionPlanner(AbstractPlanner):
    """The exact optimum of the problem that `mg-wfbp` approaches: one lane, whole
    buckets one after another, no contention. Of the optimal fusions it takes one with
    the fewest buckets.
    """

    name: ClassVar[str] = "fusion"

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """The optimum for the cluster's a and b on one lane. O(L)."""
        cost = linear_cost(workload, cluster)
        problem = FusionProblem(workload=workload, cost=cost)
        deadline_s = max(problem.finish_s(), workload.backward_s)
        ends = problem.fewest_buckets(deadline_s)
        return finish(Draft.in_turn(ends), self.name, workload, cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionProblem:
    """Tensors to be sent in contiguous buckets one after another.

    Empty tensors are sent in no time and are left out of it; `fewest_buckets` puts them
    back.
    """

    workload: Workload

    cost: LinearCost

    sent: tuple[int, ...] = field(init=False)
    """Indices of the tensors with bytes."""

    total_bytes: tuple[int, ...] = field(init=False)
    """Bytes of the first ``l`` of these, ``l`` from 0 to their number."""

    firsts: tuple[int, ...] = field(init=False)
    """For each of these the first, by number among them, of its run of one type."""

    dtype_starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.workload.tensors
        sent = tuple(i for i, tensor in enumerate(tensors) if tensor.bytes)
        starts = dtype_starts(self.workload)
        bytes_so_far = accumulate((tensors[i].bytes for i in sent), initial=0)
        firsts = tuple(bisect_left(sent, starts[i]) for i in sent)
        object.__setattr__(self, "sent", sent)
        object.__setattr__(self, "total_bytes", tuple(bytes_so_far))
        object.__setattr__(self, "firsts", firsts)
        object.__setattr__(self, "dtype_starts", starts)

    def finish_s(self) -> float:
        r"""Earliest end of the last bucket, from the start of backward.

        $f_l = \min_{k<l} \max(f_k, r_l) + a + b\,(C_l - C_k)$, $f_0 = 0$, with $r$ the
        ready times, $C$ = ``total_bytes`` and $a$, $b$ of ``cost``.

        Exact, because finishing earlier never hurts. Both $f$ and $r$ rise: of the $k$
        with $f_k \le r_l$ the largest is best, of the others the least $f_k - b C_k$.
        Both come from pointers that only move on, so this is O(L).
        """
        total, per_byte = self.total_bytes, self.cost.s_per_byte
        f = [0.0] * len(total)
        # Indices k with f[k] > r, by rising f[k] - b C[k]: the front is best.
        late: deque[int] = deque()
        in_time = 0
        for l, first in enumerate(self.firsts, start=1):  # noqa: E741
            ready_s = self._ready_s(l)
            value = f[l - 1] - per_byte * total[l - 1]
            while late and f[late[-1]] - per_byte * total[late[-1]] >= value:
                late.pop()
            late.append(l - 1)
            while late and (late[0] < first or f[late[0]] <= ready_s):
                late.popleft()
            while in_time + 1 < l and f[in_time + 1] <= ready_s:
                in_time += 1
            choices = []
            if in_time >= first and f[in_time] <= ready_s:
                choices.append(ready_s - per_byte * total[in_time])
            if late:
                choices.append(f[late[0]] - per_byte * total[late[0]])
            f[l] = min(choices) + self.cost.startup_s + per_byte * total[l]
        return f[-1]

    def fewest_buckets(self, deadline_s: float) -> tuple[int, ...]:
        """Ends of as few buckets as can all be sent by a deadline that can be met.

        From the back: the last bucket as large as the deadline lets it be, which leaves
        the tensors before it the fewest bytes for the same latest end, then the bucket
        before that. O(L). A deadline below `finish_s` yields some fusion that misses
        it. The ends are indices of the workload's tensors, empty ones included.
        """
        total = self.total_bytes
        slack_s = 1e-12 * max(deadline_s, 1e-9)
        ends: list[int] = []
        end = len(self.sent)
        while end:
            ends.append(end)
            start = end - 1
            while start > self.firsts[end - 1]:
                duration_s = self.cost.of(total[end] - total[start - 1])
                if deadline_s - duration_s < self._ready_s(end) - slack_s:
                    break
                start -= 1
            deadline_s -= self.cost.of(total[end] - total[start])
            end = start
        return self.with_empty(ends[::-1])

    def _ready_s(self, end: int) -> float:
        """When a bucket that ends with the ``end``-th sent tensor is ready."""
        return self.workload.tensors[self.sent[end - 1]].ready_s

    def with_empty(self, ends: list[int]) -> tuple[int, ...]:
        """Ends over all tensors: an empty one joins the bucket after it if their types
        allow, where it delays nothing; without one after it, it is a bucket of its own
        unless it is ready with the last.
        """
        tensors, starts = self.workload.tensors, self.dtype_starts
        cuts = {i for i, start in enumerate(starts) if start == i and i}
        cuts.add(len(tensors))
        cuts.update(self.sent[end - 1] + 1 for end in ends[:-1])
        if ends:
            last = self.sent[-1]
            while (
                last + 1 < len(tensors)
                and last + 1 not in cuts
                and tensors[last + 1].ready_s <= tensors[last].ready_s
            ):
                last += 1
            cuts.add(last + 1)
        return tuple(sorted(cuts))
