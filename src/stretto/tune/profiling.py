"""A running DDP job measured without communication, while its training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.distributed as dist

from stretto.measure import StepObserver
from stretto.runtime import AbstractStepObserver
from stretto.schema import Bucket, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.recorder import BucketRow
    from stretto.schema import Workload

PROFILE_PLANNER = "profile"
"""What the plan file of a deferred step names as its planner."""


DEFERRED_LANES = 4
"""Lanes of a deferred step: where a flow can't fill the link, the wait is shorter."""


def deferred_plan(model: DistributedDataParallel) -> Plan:
    """A plan that sends everything after backward, for any model, measured or not.

    One bucket per run of parameters of one type, last declared first, as gradients
    mostly come, in as many slices as there are lanes.
    """
    buckets: list[list[str]] = []
    last = ""
    for row in reversed(model.tensor_table()):
        if row.dtype != last:
            buckets.append([])
            last = row.dtype
        buckets[-1].append(row.name)
    return Plan(
        planner=PROFILE_PLANNER,
        workload_digest="",
        ranks=dist.get_world_size(model.process_group),
        overlap="none",
        lanes=DEFERRED_LANES,
        buckets=tuple(
            Bucket(tensors=tuple(names), slices=DEFERRED_LANES) for names in buckets
        ),
    )


@final
class DeferredProfile:
    """Watches training steps whose communication waits until backward has ended.

    The steps are real: every gradient is reduced and every step counts. Backward runs
    without communication beside it, which is what a workload describes, and the wait
    for communication is taken out of the step's time. All that DDP itself does outside
    backward, such as sending buffers before forward, stays in.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._reduced: list[bool] = []
        self._reduces = self._next_reduces = True
        self._under_way = False
        self._observer = StepObserver(model.module, on_step=self._step_ended)
        self._waits = _Waits(self._observer)

    @property
    def steps(self) -> int:
        """Steps with communication that were seen whole."""
        return sum(self._reduced)

    def start(self) -> None:
        """Begins with the next step; collective."""
        self._model.apply_plan(deferred_plan(self._model))
        self._model.observe(self._waits)
        self._observer.__enter__()

    def before_forward(self, *, reduces: bool) -> None:
        """To be called before every forward of the training.

        ``reduces`` is whether its backward communicates (it does not under
        ``no_sync``): micro-steps that do not are left out of the profile.
        """
        self._next_reduces = reduces
        if not self._under_way:
            self._under_way = True
            self._reduces = reduces

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
        steps[:] = [s for s, kept in zip(steps, self._reduced, strict=True) if kept]
        self._reduced = [True] * len(steps)
        return self._observer.workload(
            name=name,
            warmup=warmup,
            group=self._model.process_group,
            max_spread_ratio=max_spread_ratio,
        )

    def _step_ended(self, _count: int) -> None:
        # Called where the next step begins, so what was announced last is the next's.
        self._reduced.append(self._reduces)
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

    def backward_ended(self, now_s: float) -> None:
        waited_until_s = min(self._finished_s, now_s)
        self._observer.exclude(max(0.0, waited_until_s - self._computed_s))
