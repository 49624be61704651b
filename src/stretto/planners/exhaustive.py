"""Brute force: the tests' oracle."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import Infeasible
from stretto.planners.base import (
    AbstractPlanner,
    Draft,
    dtype_starts,
    finish,
    positive,
)
from stretto.sim.step import StepModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.schema import Cluster, Plan, Workload

MAX_TENSORS = 8


@final
class ExhaustivePlanner(AbstractPlanner):
    """The best of all contiguous fusions, on 1, 2, ... ``max_lanes`` lanes, each bucket
    whole on any lane or in 2, 3, ... parts of any first lane.

    Lanes are alike, so a bucket opens no lane beyond the first unused one. Refuses
    more than 8 tensors.
    """

    name: ClassVar[str] = "exhaustive"

    def __init__(self, *, max_lanes: int = 2) -> None:
        """The largest number of lanes to try."""
        positive(self.name, "max_lanes", max_lanes)
        self._max_lanes = max_lanes

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """The best of all, the plainest of equals."""
        if len(workload.tensors) > MAX_TENSORS:
            raise Infeasible(
                f"planner exhaustive takes at most {MAX_TENSORS} tensors, workload "
                f"{workload.name!r} has {len(workload.tensors)}. Use planner joint."
            )
        model = StepModel(workload, cluster)
        best = min(
            self._drafts(workload),
            key=lambda d: (
                model.iteration_s(d.ends, d.lanes, d.bucket_lanes, d.slices),
                d.collectives,
                d.lanes,
            ),
        )
        return finish(best, self.name, workload, cluster)

    def _drafts(self, workload: Workload) -> Iterator[Draft]:
        for ends in all_fusions(workload):
            for lanes in range(1, self._max_lanes + 1):
                for sending in _sendings(len(ends), lanes):
                    yield Draft(
                        ends=ends,
                        lanes=lanes,
                        bucket_lanes=tuple(lane for lane, _ in sending),
                        slices=tuple(parts for _, parts in sending),
                    )


def all_fusions(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Every partition of the tensors into contiguous buckets of one type."""
    starts = dtype_starts(workload)
    number = len(starts)
    forced = {i for i, start in enumerate(starts) if start == i and i}
    free = [i for i in range(1, number) if i not in forced]
    for cuts in itertools.product((False, True), repeat=len(free)):
        chosen = forced.union(itertools.compress(free, cuts))
        yield (*sorted(chosen), number)


def _sendings(buckets: int, lanes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every (lane, slices) of every bucket, up to a renaming of unused lanes."""

    def extend(
        head: tuple[tuple[int, int], ...], used: int
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(head) == buckets:
            yield head
            return
        for lane in range(min(used + 1, lanes)):
            for parts in range(1, lanes + 1):
                yield from extend(
                    (*head, (lane, parts)), max(used, min(lanes, lane + parts))
                )

    yield from extend((), 0)
