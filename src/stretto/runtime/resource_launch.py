"""An all-reduce of a given resource, as the probe of contention sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from stretto.runtime.lanes import LanePool

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True, slots=True)
class ResourceLaunch:
    """Launches all-reduces of a resource on lane 0 of a pool."""

    pool: LanePool

    resource: int

    cut: bool
    """Whether the message is cut into as many pieces, as on Gloo."""

    def __call__(self, message: torch.Tensor) -> list[Any]:
        """Launch the all-reduce of a message, in place; return its works."""
        lane = self.pool.lane(0, self.resource)
        pieces = message.chunk(self.resource) if self.cut else (message,)
        return [lane.allreduce([piece]) for piece in pieces]
