"""A running DDP job measured without communication, while its training goes on."""

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
"""What the plan file of a deferred step names as its planner."""


DEFERRED_LANES = 4
"""Lanes of a deferred step: where a flow can't fill the link, the wait is shorter."""


def deferred_plan(model: DistributedDataParallel, lanes: int = DEFERRED_LANES) -> Plan:
    """Return a plan that sends everything after backward, measured or not."""
    return model.deferred_plan(lanes, planner=PROFILE_PLANNER)


@final
class DeferredProfile:
    """Observes training steps whose communication waits until backward has ended.

    The steps are real: every gradient is reduced and every step counts. Backward runs
    without communication beside it, which is what a workload describes, and the wait
    for communication is taken out of the step's time. All that DDP itself does outside
    backward, such as sending buffers before forward, stays in.

    The caller applies a `deferred_plan`. Nothing here communicates, except `workload`
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
        """What ended the observation, where it is ``aside``."""
        return self.observer.error

    def start(self) -> None:
        """Begin with the next step."""
        self._model.observe(self._waits)
        self.observer.__enter__()

    def begin_step(self) -> None:
        """Begin a step here rather than at the next forward."""
        self.observer.begin_step()

    def end_step(self) -> None:
        """End the step here rather than at the next forward."""
        self.observer.end_step()

    def reduced(self, step_s: float) -> tuple[list[float], float] | None:
        """End a step of ``step_s`` at the end of its reduced backward.

        Returns:
            Its row for `merged_workload` and how long it waited for communication;
            ``None`` where it was not seen whole.
        """
        waited_s = self._waits.take()
        self.observer.steps.clear()  # micro-steps without reduction
        self.observer.end_step(step_s)
        if waited_s is None or len(self.observer.steps) != 1:
            return None
        return self.observer.row_of(self.observer.steps[0]), waited_s

    def stop(self) -> None:
        """Stop observing. The deferred plan stays until another is applied."""
        self.observer.close()
        self._model.observe(None)

    def workload(
        self, *, name: str, warmup: int, max_spread_ratio: float = 0.35
    ) -> Workload:
        """Return the workload that the steps show; collective.

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
        """Return the workload of rows that were merged over ranks.

        Raises:
            SpecError: there are too few.
        """
        found = self.observer.workload(
            name=name, warmup=0, rows=rows, max_spread_ratio=math.inf
        )
        return replace(found, provenance={**found.provenance, "ranks": ranks})


def bulk_samples(
    waits: Sequence[tuple[int, float]], *, size_bytes: int, ranks: int
) -> tuple[CollectiveSample, ...]:
    """Return all-reduces after backward as samples of the network.

    ``waits`` are numbers of lanes and, for each step, the wait of the rank that came
    last, which is the collective's own time. All lanes carry equal parts of all
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
    """Reports to the observer of a step how long it waited for communication.

    The wait ends with the last collective: what DDP does after it, copying buckets back
    into gradients, belongs to a step without communication too.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._computed_s = 0.0
        self._finished_s = 0.0
        self._waited_s: float | None = None

    def take(self) -> float | None:
        """Return the last step's wait, once; ``None``: it did not communicate."""
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
