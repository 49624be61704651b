"""AIACC-Training: units of equal size on several lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import SpecError
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    finish,
    lanes_in_range,
    positive,
)
from stretto.planners.ddp import capped_ends
from stretto.sim.step_model import StepModel

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload

UNIT_BYTES = tuple(2**20 * 4**i for i in range(4))
MAX_LANES = 8
MAX_UNITS = 100_000
"""With more units, one simulated step takes seconds."""


@final
class AiaccPlanner(AbstractPlanner):
    """Gradients packed or split into units of one size, units to lanes in turn.

    Small gradients are packed until they fill a unit; a pack larger than a unit is cut
    into as many slices as units fit in it. AIACC's autotuner chooses unit size and
    number of streams on the running job. Here the simulator replaces the job, over a
    grid of unit sizes from 1 to 64 MiB and 1, 2, 4, ... lanes. Where 64 MiB would make
    more than `MAX_UNITS` units, the unit is as large as that many need.
    """

    name: ClassVar[str] = "aiacc"

    def __init__(
        self,
        *,
        unit_bytes: int | None = None,
        lanes: int | None = None,
        max_lanes: int | None = None,
    ) -> None:
        """Set unit size and lanes; ``None``: chosen, with lanes up to ``max_lanes``.

        Raises:
            SpecError: an option is out of range, or there are more lanes than allowed.
        """
        most = MAX_LANES if max_lanes is None else max_lanes
        lanes_in_range(self.name, "max_lanes", most)
        if unit_bytes is not None:
            positive(self.name, "unit_bytes", unit_bytes)
        if lanes is not None:
            lanes_in_range(self.name, "lanes", lanes)
            if max_lanes is not None and lanes > max_lanes:
                raise SpecError(
                    f"planner {self.name}: lanes must be at most the largest number of "
                    f"lanes, which is given as {max_lanes}, got {lanes}"
                )
        self._units = UNIT_BYTES if unit_bytes is None else (unit_bytes,)
        self._lanes = lane_choices(most) if lanes is None else (lanes,)

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return the grid's best plan under the simulator, the simplest of equals."""
        min_bytes = -(-workload.total_bytes // MAX_UNITS)
        if len(self._units) == 1 and self._units[0] < min_bytes:
            raise SpecError(
                f"planner {self.name}: unit_bytes must be at least {min_bytes} for "
                f"workload {workload.name!r}, so that its gradients are cut into at "
                f"most {MAX_UNITS} units; got {self._units[0]}"
            )
        sizes = [size for size in self._units if size >= min_bytes]
        model = StepModel(workload, cluster)
        drafts = [
            dispatched(
                workload, capped_ends(workload, unit_bytes, unit_bytes), unit_bytes, k
            )
            for unit_bytes in sizes or [min_bytes]
            for k in self._lanes
        ]
        best = min(
            drafts,
            key=lambda d: (d.iteration_s(model), d.collectives, d.lanes),
        )
        return finish(best, self.name, workload, cluster)


def lane_choices(max_lanes: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to a limit, and the limit."""
    powers = [2**i for i in range(max_lanes.bit_length()) if 2**i < max_lanes]
    return (*powers, max_lanes)


def dispatched(
    workload: Workload, ends: tuple[int, ...], unit_bytes: int, lanes: int
) -> Draft:
    """Return packs cut into units of at most a size, units to lanes in turn."""
    slices: list[int] = []
    bucket_lanes: list[int] = []
    start = next_lane = 0
    for end in ends:
        size = sum(t.bytes for t in workload.tensors[start:end])
        parts = max(1, -(-size // unit_bytes))
        slices.append(parts)
        bucket_lanes.append(next_lane % lanes)
        next_lane += parts
        start = end
    return Draft(
        ends=ends,
        slices=tuple(slices),
        bucket_lanes=tuple(bucket_lanes),
        lanes=lanes,
    )
