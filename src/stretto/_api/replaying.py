"""Replay a plan: its real communication beside emulated computation."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.errors import PlanMismatch, SpecError
from stretto.measure.emulated import EmulatedModel
from stretto.measure.network import device_of
from stretto.runtime import AbstractStepObserver, DistributedDataParallel
from stretto.runtime.forward.steps import separable
from stretto.runtime.recording.step import StepMarks, compute_spans, lane_spans
from stretto.schema import Timeline
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stretto.runtime.recording.step import BucketRow
    from stretto.schema import Cluster, Plan, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """When one bucket travels, in seconds from the start of backward."""

    bucket: int

    bytes: int

    predicted_launch_s: float
    """When its gradients, and those that launch before it, are ready."""

    measured_launch_s: float

    predicted_end_s: float
    """When its last slice has arrived."""

    measured_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replayed plan: predicted times beside medians over the measured steps.

    Each step counts as its slowest rank.
    """

    ranks: int

    steps_s: tuple[float, ...]
    """Each measured step."""

    predicted_s: float

    buckets: tuple[BucketTimes, ...]
    """The buckets that send something."""

    timeline: Timeline
    """This rank's last step."""

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Predicted over measured step, minus 1."""
        return self.predicted_s / self.measured_s - 1.0


def replay(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    steps: int = 20,
    warmup: int = 3,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Execute a plan on the default process group, with waiting as computation.

    Call it on every rank; all get the same value. The prediction is that of the cluster
    without contention, because waiting does not slow beside communication.

    Args:
        workload: gives the model's sizes and times.
        plan: made for the workload and this number of ranks.
        cluster: the network's figures, for the prediction.
        steps: number of measured steps.
        warmup: number of steps before them.
        progress: called with the number of steps so far.

    Raises:
        PlanMismatch: the plan is for another model or number of ranks, or needs a
            feature that the runtime does not support.
        SpecError: there are too few steps.
    """
    if steps < 1 or warmup < 0:
        raise SpecError(
            f"a replay needs at least 1 step and 0 steps of warm-up, got {steps} and "
            f"{warmup}"
        )
    if plan.ranks != dist.get_world_size():
        raise PlanMismatch(
            f"the plan was made for {plan.ranks} ranks, but {dist.get_world_size()} "
            "run: plan again for this number of ranks, or start the plan's"
        )
    predicted = _Predicted(workload, replace(cluster, contention=None), plan)
    watch = _StepEvents()
    model = DistributedDataParallel(
        EmulatedModel(workload).to(device_of(None)),
        plan=plan,
        record=watch,
        gradient_as_bucket_view=True,
    )
    optimizer = separable(_NoUpdate(model.parameters()))
    dist.barrier()
    starts_s = []
    for step in range(warmup + steps):
        starts_s.append(perf_counter())
        model().backward()
        optimizer.step()
        if progress is not None:
            progress(step + 1)
    starts_s.append(perf_counter())
    with torch.no_grad():
        model()  # waits for the last step's communication
    measured_s = [after - before for before, after in pairwise(starts_s)]
    counted = range(warmup, warmup + steps)
    own = [watch.times(counted, predicted.buckets), measured_s[warmup:]]
    slowest = _slowest(own)
    return Replay(
        ranks=dist.get_world_size(),
        steps_s=tuple(slowest[1]),
        predicted_s=predicted.iteration_s,
        buckets=predicted.beside(slowest[0]),
        timeline=watch.timeline(f"{workload.name} replayed", counted[-1]),
    )


class _Predicted:
    """Predicted times of a step and its buckets, from the start of backward."""

    def __init__(self, workload: Workload, cluster: Cluster, plan: Plan) -> None:
        result = simulate_step(workload, cluster, plan)
        self.iteration_s = result.iteration_s
        begins_s = 0.0 if plan.overlap == "forward" else workload.forward_s
        self._launch_s: dict[int, float] = {}
        self._end_s: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        for span in result.timeline.spans:
            if span.args.get("kind") not in ("wait", "send"):
                continue
            bucket = int(span.args["bucket"])
            start_s, end_s = span.start_s - begins_s, span.end_s - begins_s
            self._launch_s[bucket] = min(self._launch_s.get(bucket, start_s), start_s)
            if span.args["kind"] == "send":
                self._end_s[bucket] = max(self._end_s.get(bucket, end_s), end_s)
                size = int(span.args["bytes"])
                self._bytes[bucket] = self._bytes.get(bucket, 0) + size
        self.buckets = sorted(self._end_s)

    def beside(self, measured_s: Sequence[float]) -> tuple[BucketTimes, ...]:
        """Return the rows; ``measured_s`` has launch and end of each bucket."""
        return tuple(
            BucketTimes(
                bucket=bucket,
                bytes=self._bytes[bucket],
                predicted_launch_s=self._launch_s[bucket],
                measured_launch_s=measured_s[2 * i],
                predicted_end_s=self._end_s[bucket],
                measured_end_s=measured_s[2 * i + 1],
            )
            for i, bucket in enumerate(self.buckets)
        )


@final
class _NoUpdate(torch.optim.Optimizer):
    """Leaves parameters as they are; a workload's forward has the optimizer's time.

    With overlap ``forward`` its step lets the next forward begin before all buckets
    have arrived.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@final
class _StepEvents(AbstractStepObserver):
    """Records launches and ends of all steps.

    A bucket's slices end before it is launched again, so ends belong to steps by their
    number, also those of slices that travel under the next step's forward.
    """

    takes_late_ends = True

    def __init__(self) -> None:
        self.buckets: tuple[BucketRow, ...] = ()
        self.forwards_s: list[list[float]] = []
        self.backwards_s: list[float] = []
        self.computed_s: list[float] = []
        self.ended_s: list[float] = []
        self.launches_s: dict[int, list[float]] = {}
        self.finished: dict[int, list[tuple[int, float]]] = {}

    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:
        self.buckets = tuple(buckets)
        self.launches_s = {i: [] for i in range(len(buckets))}
        self.finished = {i: [] for i in range(len(buckets))}

    def forward_started(self, now_s: float) -> None:
        self.forwards_s.append([now_s, now_s])

    def forward_ended(self, now_s: float) -> None:
        self.forwards_s[-1][1] = now_s

    def backward_started(self, now_s: float) -> None:
        self.backwards_s.append(now_s)

    def gradient_ready(self, tensor: int, now_s: float) -> None:
        pass

    def bucket_launched(self, bucket: int, now_s: float) -> None:
        self.launches_s[bucket].append(now_s)

    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self.finished[bucket].append((lane, now_s))

    def backward_computed(self, now_s: float) -> None:
        self.computed_s.append(now_s)

    def backward_ended(self, now_s: float) -> None:
        self.ended_s.append(now_s)

    def step(self, number: int) -> StepMarks:
        """Return one step, with all of its slices; one rank sends none."""
        start_s, end_s = self.forwards_s[number]
        launched = [(b, at_s[number]) for b, at_s in self.launches_s.items() if at_s]
        return StepMarks(
            number=number,
            forward_s=(start_s, end_s),
            backward_s=self.backwards_s[number],
            computed_s=self.computed_s[number],
            ended_s=self.ended_s[number],
            launched=tuple(launched),
            finished=tuple(
                (bucket, lane, at_s)
                for bucket, _ in launched
                for lane, at_s in self._ends(bucket, number)
            ),
        )

    def _ends(self, bucket: int, number: int) -> list[tuple[int, float]]:
        count = len(self.buckets[bucket].slices)
        return self.finished[bucket][number * count : (number + 1) * count]

    def times(self, numbers: Iterable[int], buckets: Iterable[int]) -> list[float]:
        """Return median launch and end of each bucket over some steps."""
        rows: dict[int, tuple[list[float], list[float]]] = {
            b: ([], []) for b in buckets
        }
        for number in numbers:
            begins_s = self.backwards_s[number]
            for bucket, (launches_s, ends_s) in rows.items():
                launches_s.append(self.launches_s[bucket][number] - begins_s)
                last_s = max(at_s for _, at_s in self._ends(bucket, number))
                ends_s.append(last_s - begins_s)
        return [statistics.median(times_s) for row in rows.values() for times_s in row]

    def timeline(self, name: str, number: int) -> Timeline:
        """Return one step from the start of its forward."""
        step = self.step(number)
        origin_s = step.forward_s[0]
        spans = compute_spans(step, origin_s)
        return Timeline(
            name=name, spans=(*spans, *lane_spans(step, self.buckets, origin_s))
        )


def _slowest(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each value of the rank where it is largest."""
    table = torch.tensor([v for row in values for v in row], dtype=torch.float64)
    device = device_of(None)
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    flat: list[float] = table.tolist()
    found = []
    for row in values:
        found.append(flat[: len(row)])
        flat = flat[len(row) :]
    return found
