"""Horovod's fusion buffer and cycle time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    dtype_starts,
    finish,
    linear_cost,
    positive,
)

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload


@final
class HorovodPlanner(AbstractPlanner):
    """Each cycle sends everything that is ready, fused up to the threshold.

    A cycle's collectives run one after another; the next cycle begins ``cycle_s`` after
    this one began, or when its collectives have ended if that is later. A tensor that
    would bring a buffer above ``fusion_bytes`` opens the next one. The defaults are
    Horovod's up to 0.20, the version that the papers compare with; 0.21 changed them to
    1 ms and 128 MiB.
    """

    name: ClassVar[str] = "horovod"

    def __init__(
        self, *, fusion_bytes: int = 64 * 2**20, cycle_s: float = 0.005
    ) -> None:
        """Set the size of the fusion buffer and the cycle time."""
        positive(self.name, "fusion_bytes", fusion_bytes)
        positive(self.name, "cycle_s", cycle_s)
        self._fusion_bytes = fusion_bytes
        self._cycle_s = cycle_s

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return one bucket per fused buffer, on one lane, for the cluster's costs."""
        tensors = workload.tensors
        starts = dtype_starts(workload)
        cost = linear_cost(workload, cluster)
        ends: list[int] = []
        first = 0
        at_s = 0.0
        while first < len(tensors):
            # The cycle that sees the next tensor: idle cycles in between keep their
            # period.
            late_s = tensors[first].ready_s - at_s
            if late_s > 0:
                at_s += -(-late_s // self._cycle_s) * self._cycle_s
                at_s = max(at_s, tensors[first].ready_s)
            busy_until_s = at_s
            begin = first
            size_bytes = 0
            while first < len(tensors) and tensors[first].ready_s <= at_s:
                size = tensors[first].bytes
                full = size_bytes + size > self._fusion_bytes
                if first > begin and (full or starts[first] == first):
                    ends.append(first)
                    busy_until_s += cost.of(size_bytes)
                    begin, size_bytes = first, 0
                size_bytes += size
                first += 1
            ends.append(first)
            busy_until_s += cost.of(size_bytes)
            at_s = max(at_s + self._cycle_s, busy_until_s)
        return finish(Draft.in_turn(ends), self.name, workload, cluster)
