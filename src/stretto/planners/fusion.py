"""Exact sequential tensor fusion."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from copy import copy
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

_INF = float("inf")


@final
class FusionPlanner(AbstractPlanner):
    """The exact optimum of the problem that `mg-wfbp` approximates.

    One lane sends whole buckets one after another, without contention. Of the optimal
    fusions it takes one with the fewest buckets.
    """

    name: ClassVar[str] = "fusion"

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the optimum for the cluster's a and b on one lane. O(L)."""
        cost = linear_cost(workload, cluster)
        problem = FusionProblem(workload=workload, cost=cost)
        deadline_s = max(problem.finish_s(), workload.backward_s)
        ends = problem.fewest_buckets(deadline_s)
        return finish(Draft.in_turn(ends), self.name, workload, cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionProblem:
    """Tensors to be sent in contiguous buckets one after another.

    Empty tensors take no time to send and are left out; `fewest_buckets` adds them
    back.
    """

    workload: Workload

    cost: LinearCost

    sent: tuple[int, ...] = field(init=False)
    """Indices of the tensors with bytes."""

    total_bytes: tuple[int, ...] = field(init=False)
    """Bytes of the first ``l`` of these, ``l`` from 0 to their number."""

    firsts: tuple[int, ...] = field(init=False)
    """For each of these, the first of its run of one type, by position among them."""

    ready_s: tuple[float, ...] = field(init=False)
    """When each of these is ready."""

    dtype_starts: tuple[int, ...] = field(init=False)

    dtype_cuts: frozenset[int] = field(init=False)
    """Where a bucket must end because the type changes, and the end of all."""

    def __post_init__(self) -> None:
        tensors = self.workload.tensors
        sent = tuple(i for i, tensor in enumerate(tensors) if tensor.bytes)
        starts = dtype_starts(self.workload)
        bytes_so_far = accumulate((tensors[i].bytes for i in sent), initial=0)
        firsts = tuple(bisect_left(sent, starts[i]) for i in sent)
        object.__setattr__(self, "sent", sent)
        object.__setattr__(self, "total_bytes", tuple(bytes_so_far))
        object.__setattr__(self, "firsts", firsts)
        object.__setattr__(self, "ready_s", tuple(tensors[i].ready_s for i in sent))
        object.__setattr__(self, "dtype_starts", starts)
        cuts = {i for i, start in enumerate(starts) if start == i and i}
        object.__setattr__(self, "dtype_cuts", frozenset((*cuts, len(tensors))))

    def at(self, cost: LinearCost) -> FusionProblem:
        """Return the same tensors at another cost, without processing them again."""
        other = copy(self)
        object.__setattr__(other, "cost", cost)
        return other

    def finish_s(self) -> float:
        r"""Earliest end of the last bucket, from the start of backward.

        $f_l = \min_{k<l} \max(f_k, r_l) + a + b\,(C_l - C_k)$, $f_0 = 0$, with $r$ the
        ready times, $C$ = ``total_bytes`` and $a$, $b$ of ``cost``.

        Exact, because finishing earlier never hurts. Both $f$ and $r$ rise: of the $k$
        with $f_k \le r_l$ the largest is best, of the others the least $f_k - b C_k$.
        Both come from pointers that only advance, so this is O(L).
        """
        per_byte, startup_s = self.cost.s_per_byte, self.cost.startup_s
        sending_s = [per_byte * total for total in self.total_bytes]
        f = [0.0] * len(sending_s)
        # Indices k with f[k] > r, by rising f[k] - b C[k]: the front is best.
        late: deque[tuple[float, int]] = deque()
        in_time = 0
        # fast: a search calls this some sixty times; lists, not methods, halve it.
        for l, (first, ready_s) in enumerate(  # noqa: E741
            zip(self.firsts, self.ready_s, strict=True), start=1
        ):
            value = f[l - 1] - sending_s[l - 1]
            while late and late[-1][0] >= value:
                late.pop()
            late.append((value, l - 1))
            while late and (late[0][1] < first or f[late[0][1]] <= ready_s):
                late.popleft()
            while in_time + 1 < l and f[in_time + 1] <= ready_s:
                in_time += 1
            best = late[0][0] if late else _INF
            if in_time >= first and f[in_time] <= ready_s:
                best = min(best, ready_s - sending_s[in_time])
            f[l] = best + startup_s + sending_s[l]
        return f[-1]

    def fewest_buckets(self, deadline_s: float) -> tuple[int, ...]:
        """Return ends of the fewest buckets that meet a feasible deadline.

        From the back: the last bucket is as large as the deadline allows, which leaves
        the tensors before it the fewest bytes for the same latest end; then the bucket
        before that. O(B log L) for B buckets. A deadline below `finish_s` yields some
        fusion that misses it. The ends are indices of the workload's tensors, including
        empty ones.
        """
        total = self.total_bytes
        startup_s, per_byte = self.cost.startup_s, self.cost.s_per_byte
        slack_s = 1e-12 * max(deadline_s, 1e-9)
        ends: list[int] = []
        end = len(self.sent)
        while end:
            ends.append(end)
            # The first start with which the bucket is sent in time; fewer bytes take
            # less time, so all later starts work too.
            latest_s = deadline_s - startup_s
            sum_bytes = total[end]
            start = bisect_left(
                range(end - 1),
                self.ready_s[end - 1] - slack_s,
                self.firsts[end - 1],
                key=lambda k: latest_s - per_byte * (sum_bytes - total[k]),
            )
            deadline_s -= self.cost.of(total[end] - total[start])
            end = start
        return self.with_empty(ends[::-1])

    def with_empty(self, ends: list[int]) -> tuple[int, ...]:
        """Return ends over all tensors, including empty ones.

        An empty tensor joins the bucket after it if their types allow, where it delays
        nothing. If no bucket follows, it is a bucket of its own unless it is ready with
        the last.
        """
        tensors, cuts = self.workload.tensors, set(self.dtype_cuts)
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
