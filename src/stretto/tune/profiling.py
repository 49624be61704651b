"""A running DDP job measured without communication, while its training goes on."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist

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
    """Watches training steps whose communication waits until backward has ended.

    The steps are real: every gradient is reduced and every step counts. Backward runs
    without communication beside it, which is what a workload describes, and the wait
    for communication is taken out of the step's time. All that DDP itself does outside
    backward, such as sending buffers before forward, stays in.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        lanes: Sequence[int] = (DEFERRED_LANES,),
    ) -> None:
        """Prepares; ``lanes`` are those of the first steps, the last goes on.

        Different lanes make the steps' own communication a probe of the network; a
        step that begins with other lanes than the last does not count for the workload.
        """
        self._model = model
        self._lanes = tuple(lanes)
        self._applied = 0
        self._reduced: list[bool] = []
        self._counts: list[bool] = []
        self._disturbed = False
        self._reduces = self._next_reduces = True
        self._under_way = False
        self._observer = StepObserver(
            model.module,
            on_step=self._step_ended,
            parameters=model.trained_parameters(),
            unused=True,
        )
        self._waits = _Waits(self._observer)

    @property
    def steps(self) -> int:
        """Steps with communication that were seen whole."""
        return sum(self._reduced)

    def start(self) -> None:
        """Begins with the next step; collective."""
        self._apply(self._lanes[0])
        self._model.observe(self._waits)
        self._observer.__enter__()

    def before_forward(self, *, reduces: bool) -> None:
        """To be called before every forward of the training.

        ``reduces`` is whether its backward communicates (it does not under
        ``no_sync``): micro-steps that do not are left out of the profile.
        """
        if self._observer.whole:
            self._observer.end_step()
            self._under_way = False
        self._next_reduces = reduces
        if not self._under_way:
            self._under_way = True
            self._reduces = reduces
            if self._reduced and self._reduced[-1]:  # not between micro-steps
                self._change()

    def extend(self, lanes: Sequence[int]) -> None:
        """Goes on with these lanes, from the step that begins now; collective."""
        self._lanes = (*self._lanes[: self.steps], *lanes)
        self._change()

    def _change(self) -> None:
        lanes = self._lanes[min(self.steps, len(self._lanes) - 1)]
        if lanes != self._applied:
            self._apply(lanes)
            self._disturbed = True  # new buckets are touched for the first time

    def _apply(self, lanes: int) -> None:
        self._model.apply_plan(deferred_plan(self._model, lanes))
        self._applied = self._waits.lanes = lanes

    def begin_step(self) -> None:
        """Begins a step here rather than at the next forward."""
        self._observer.begin_step()

    def end_step(self) -> None:
        """Ends the step here rather than at the next forward."""
        self._observer.end_step()

    def stop(self) -> None:
        """Stops watching. The deferred plan stays until another is applied."""
        self._observer.close()
        self._model.observe(None)

    def workload(
        self, *, name: str, warmup: int, max_spread_ratio: float = 0.35
    ) -> Workload:
        """The workload that the steps show; collective.

        Raises:
            NoisyProfile: the steps differ too much.
        """
        steps = self._observer.steps
        steps[:] = [s for s, counts in zip(steps, self._counts, strict=True) if counts]
        self._reduced = [True] * len(steps)
        self._counts = [True] * len(steps)
        return self._observer.workload(
            name=name,
            warmup=warmup,
            group=self._model.process_group,
            max_spread_ratio=max_spread_ratio,
        )

    def collectives(self, *, warmup: int) -> tuple[CollectiveSample, ...]:
        """The all-reduces after backward as samples of the network; collective.

        All lanes carry equal parts of all gradients at once. The wait of the rank that
        was last to come is the collective's own time. Empty where the host does not
        see its end (CUDA) or ranks saw different numbers of steps.
        """
        waits = self._waits.seen[warmup:]
        group = self._model.process_group
        rows = [float(len(waits)), -float(len(waits)), *(s for _, s in waits)]
        counts = torch.tensor(rows[:2], dtype=torch.float64)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=group)
        if not waits or counts[0] != -counts[1]:
            return ()
        table = torch.tensor(rows[2:], dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MIN, group=group)
        by_lanes: dict[int, list[float]] = {}
        for (lanes, _), wait_s in zip(waits, table.tolist(), strict=True):
            if wait_s > 0:
                by_lanes.setdefault(lanes, []).append(wait_s)
        size_bytes = sum(row.bytes for row in self._model.tensor_table())
        return tuple(
            CollectiveSample(
                size_bytes=max(1, size_bytes // lanes),
                lanes=lanes,
                ranks=dist.get_world_size(group),
                duration_s=statistics.median(times_s),
                spread_s=max(times_s) - min(times_s),
                repetitions=len(times_s),
            )
            for lanes, times_s in sorted(by_lanes.items())
        )

    def _step_ended(self, _count: int) -> None:
        # Called where the next step begins, so what was announced last is the next's.
        self._reduced.append(self._reduces)
        self._counts.append(self._reduces and not self._disturbed)
        self._disturbed = False
        self._reduces = self._next_reduces


@final
class _Waits(AbstractStepObserver):
    """Tells the observer of a step how long it waited for communication.

    The wait ends with the last collective: what DDP does after it, copying buckets back
    into gradients, belongs to a step without communication too.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self._computed_s = 0.0
        self._finished_s = 0.0
        self.lanes = 0
        self.seen: list[tuple[int, float]] = []
        """Lanes and wait of every step that communicated."""

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
        wait_s = max(0.0, waited_until_s - self._computed_s)
        self._observer.exclude(wait_s)
        self.seen.append((self.lanes, wait_s))
