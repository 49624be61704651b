"""DeAR: every all-reduce in halves, one during backward and one during forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    finish,
    positive,
    predicted_s,
)
from stretto.planners.ddp import capped_ends

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload

SIZES_BYTES = tuple(1 << power for power in range(20, 28))
"""Sizes of the fusion buffer from 1 to 128 MiB; DeAR tunes it while it trains."""


@final
class DearPlanner(AbstractPlanner):
    """Buckets of a fixed size on one lane, in halves (overlap ``halves``).

    ``fusion_bytes`` is the size of the buffer; by default, the best of `SIZES_BYTES`
    under the simulator, which stands for DeAR's search by Bayesian optimization. Only
    to compare with: the runtime refuses such plans.

    Source: Zhang et al., DeAR, ICDCS 2023.
    """

    name: ClassVar[str] = "dear"

    def __init__(self, *, fusion_bytes: int | None = None) -> None:
        """Set the size of the fusion buffer."""
        if fusion_bytes is not None:
            positive(self.name, "fusion_bytes", fusion_bytes)
        self._sizes = SIZES_BYTES if fusion_bytes is None else (fusion_bytes,)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the fastest of the sizes, the one with fewest buckets of equals."""
        fusions = dict.fromkeys(
            capped_ends(workload, size, size) for size in self._sizes
        )
        drafts = [Draft.in_turn(ends, overlap="halves") for ends in fusions]
        plans = [finish(draft, self.name, workload, cluster) for draft in drafts]
        return min(plans, key=lambda plan: (predicted_s(plan), len(plan.buckets)))
