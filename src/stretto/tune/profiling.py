"""Measure a running DDP job without communication while its training continues."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, final

from stretto.measure import StepObserver
from stretto.runtime import AbstractStepObserver
from stretto.schema import CollectiveSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.recorder import BucketRow
    from stretto.schema import Plan, Workload

PROFILE_PLANNER = "profile"
"""The planner's name in the plan of a deferred step."""


DEFERRED_LANES = 4
"""Lanes of a deferred step: if one flow can't fill the link, this shortens the wait."""


def deferred_plan(model: DistributedDataParallel, lanes: int = DEFERRED_LANES) -> Plan:
    """Return a plan that sends everything after backward, before any measurement."""
    return model.deferred_plan(lanes, planner=PROFILE_PLANNER)


@final
class DeferredProfile:
    """Observe training steps whose communication waits until backward has ended.

    The steps are real: every gradient is reduced and every step counts. Backward runs
    without concurrent communication, which is what a workload describes, and the wait
    for communication is subtracted from the step's time. DDP's own work outside
    backward, such as sending buffers before forward, is included.

    The caller applies a `deferred_plan`. No method communicates, except `workload`
    without rows.
    """

    def __init__(self, model: DistributedDataParallel, *, aside: bool = False) -> None:
        """Prepare; ``aside`` is as for `StepObserver`."""
        self._model = model
        self.observer = StepObserver(
            model.module,
            aside=aside,
            parameters=model.trained_parameters(),
            unused=True,
        )
        self._waits = _Waits(self.observer)

    @property
    def error(self) -> Exception | None:
        """The error that ended the observation, if it is ``aside``."""
        return self.observer.error

    def start(self) -> None:
        """Start with the next step."""
        self._model.observe(self._waits)
        self.observer.__enter__()

    def begin_step(self) -> None:
        """Begin a step now rather than at the next forward."""
        self.observer.begin_step()

    def end_step(self) -> None:
        """End the step now rather than at the next forward."""
        self.observer.end_step()

    def reduced(self, step_s: float) -> tuple[list[float], float] | None:
        """End a step of ``step_s`` at the end of its reduced backward.

        Returns:
            Its row for `merged_workload` and its wait for communication, or ``None`` if
            the step was not observed completely.
        """
        waited_s = self._waits.take()
        self.observer.steps.clear()  # micro-steps without reduction
        self.observer.end_step(step_s)
        if waited_s is None or len(self.observer.steps) != 1:
            return None
        return self.observer.row_of(self.observer.steps[0]), waited_s

    def stop(self) -> None:
        """Stop observing. The deferred plan stays in use until another is applied."""
        self.observer.close()
        self._model.observe(None)

    def workload(
        self, *, name: str, warmup: int, max_spread_ratio: float = 0.35
    ) -> Workload:
        """Return the workload of the observed steps; collective.

        Raises:
            NoisyProfile: the steps differ too much.
        """
        return self.observer.workload(
            name=name,
            warmup=warmup,
            group=self._model.process_group,
            max_spread_ratio=max_spread_ratio,
        )

    def merged_workload(
        self, *, name: str, rows: Sequence[Sequence[float]], ranks: int
    ) -> Workload:
        """Return the workload for rows that were merged over ranks.

        Raises:
            SpecError: there are too few rows.
        """
        found = self.observer.workload(
            name=name, warmup=0, rows=rows, max_spread_ratio=math.inf
        )
        return replace(found, provenance={**found.provenance, "ranks": ranks})


def bulk_samples(
    waits: Sequence[tuple[int, float]], *, size_bytes: int, ranks: int
) -> tuple[CollectiveSample, ...]:
    """Return all-reduces after backward as samples of the network.

    ``waits`` contains, for each step, the number of lanes and the wait of the last
    rank, which is the collective's own time. All lanes transfer equal parts of all
    gradients at once.
    """
    by_lanes: dict[int, list[float]] = {}
    for lanes, wait_s in waits:
        if wait_s > 0:
            by_lanes.setdefault(lanes, []).append(wait_s)
    return tuple(
        CollectiveSample(
            size_bytes=max(1, size_bytes // lanes),
            lanes=lanes,
            ranks=ranks,
            duration_s=statistics.median(times_s),
            spread_s=max(times_s) - min(times_s),
            repetitions=len(times_s),
        )
        for lanes, times_s in sorted(by_lanes.items())
    )


@final
class _Waits(AbstractStepObserver):
    """Report each step's wait for communication to the step's observer.

    The wait ends with the last collective. DDP's later work, copying buckets back into
    gradients, is also part of a step without communication.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._computed_s = 0.0
        self._finished_s = 0.0
        self._waited_s: float | None = None

    def take(self) -> float | None:
        """Return the last step's wait, once; ``None`` if it did not communicate."""
        waited_s, self._waited_s = self._waited_s, None
        return waited_s

    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:
        pass

    def forward_started(self, now_s: float) -> None:
        pass

    def forward_ended(self, now_s: float) -> None:
        pass

    def backward_started(self, now_s: float) -> None:
        pass

    def gradient_ready(self, tensor: int, now_s: float) -> None:
        pass

    def bucket_launched(self, bucket: int, now_s: float) -> None:
        pass

    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self._finished_s = now_s  # lanes end in any order, but close together

    def backward_computed(self, now_s: float) -> None:
        self._computed_s = now_s
        self._finished_s = 0.0

    def backward_ended(self, now_s: float) -> None:
        waited_until_s = min(self._finished_s, now_s)
        self._waited_s = max(0.0, waited_until_s - self._computed_s)
        self._observer.exclude(self._waited_s)
