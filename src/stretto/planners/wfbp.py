"""Wait-free backpropagation: every gradient on its own, as soon as it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import AbstractPlanner, Draft, finish

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload


@final
class WfbpPlanner(AbstractPlanner):
    """One bucket per tensor on one lane."""

    name: ClassVar[str] = "wfbp"

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return one bucket per tensor."""
        draft = Draft.in_turn(range(1, len(workload.tensors) + 1))
        return finish(draft, self.name, workload, cluster)
