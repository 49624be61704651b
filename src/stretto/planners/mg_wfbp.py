"""MG-WFBP's greedy merging, as published: a baseline, not an optimum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    dtype_starts,
    finish,
    linear_cost,
)

if TYPE_CHECKING:
    from stretto.planners.base import LinearCost
    from stretto.schema import Cluster, Plan, Workload


@final
class MgWfbpPlanner(AbstractPlanner):
    r"""Merges a tensor into the open bucket if that pays off for these two alone.

    The test is Eq. 5 of ASC-WFBP (INFOCOM 2021), restated from MG-WFBP: with a bucket
    that could start at $\tau_c$ and start-up $a$, the next gradient is merged if it is
    ready before $\tau_c + a$. O(L). Waiting adds up over a chain of merges, so the
    result can be worse than `fusion`, the exact optimum of the same problem.
    """

    name: ClassVar[str] = "mg-wfbp"

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the greedy merges for the cluster's a and b on one lane."""
        ends = greedy_ends(workload, linear_cost(workload, cluster))
        return finish(Draft.in_turn(ends), self.name, workload, cluster)


def greedy_ends(workload: Workload, cost: LinearCost) -> tuple[int, ...]:
    """Return ends of the buckets that the published test builds."""
    starts = dtype_starts(workload)
    tensors = workload.tensors
    ends: list[int] = []
    lane_free_s = 0.0
    begin_s = tensors[0].ready_s
    size_bytes = tensors[0].bytes
    for i, tensor in enumerate(tensors[1:], start=1):
        pays = tensor.ready_s < begin_s + cost.startup_s
        if starts[i] == i or not pays:
            ends.append(i)
            lane_free_s = begin_s + cost.of(size_bytes)
            size_bytes = 0
        begin_s = max(tensor.ready_s, lane_free_s)
        size_bytes += tensor.bytes
    return (*ends, len(tensors))
