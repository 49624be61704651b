"""No overlap: everything in one bucket after backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import AbstractPlanner, Draft, dtype_starts, finish

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload


@final
class SinglePlanner(AbstractPlanner):
    """One all-reduce when backward has ended, one per run of a type where types differ.

    The papers' SynEASGD.
    """

    name: ClassVar[str] = "single"

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return one bucket, or one per run of a type."""
        starts = dtype_starts(workload)
        ends = [i for i, start in enumerate(starts) if start == i and i > 0]
        draft = Draft.in_turn([*ends, len(starts)], overlap="none")
        return finish(draft, self.name, workload, cluster)
