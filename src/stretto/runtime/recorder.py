"""Record the real events of a step as a Timeline."""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from stretto.runtime.marks import marks_for
from stretto.runtime.steps import StepMarks, compute_spans, lane_spans
from stretto.schema import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stretto.schema import Span


class AbstractStepObserver(abc.ABC):
    """Receives the events of a step, in `time.perf_counter` seconds.

    An implementation must return at once and must not raise: it is called between a
    gradient and its collective. `slice_finished` is called from lanes' threads, the
    others from the thread that runs forward and backward.
    """

    @abc.abstractmethod
    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:
        """Record a new plan: parameters by index, and buckets by index."""

    @abc.abstractmethod
    def forward_started(self, now_s: float) -> None:
        """Record the start of forward: a new step."""

    @abc.abstractmethod
    def forward_ended(self, now_s: float) -> None:
        """Record that the model's output is ready."""

    @abc.abstractmethod
    def backward_started(self, now_s: float) -> None:
        """Record that the first gradient of the model's output is ready."""

    @abc.abstractmethod
    def gradient_ready(self, tensor: int, now_s: float) -> None:
        """Record that a parameter's gradient is ready."""

    @abc.abstractmethod
    def bucket_launched(self, bucket: int, now_s: float) -> None:
        """Record that a bucket's gradients are ready and its slices are launched."""

    @abc.abstractmethod
    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        """Record the end of a slice's all-reduce."""

    @abc.abstractmethod
    def backward_computed(self, now_s: float) -> None:
        """Record the end of backward's computation; communication may still run."""

    @abc.abstractmethod
    def backward_ended(self, now_s: float) -> None:
        """Record that all gradients are reduced and in place, as backward() ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRow:
    """An observer's description of a bucket, sent when a plan is applied."""

    tensors: tuple[str, ...]

    slices: tuple[tuple[int, int], ...]
    """(lane, bytes) of each slice."""


@dataclass(slots=True)
class _Step:
    """Marks of one step, by event."""

    number: int = 0
    forward: tuple[Any, Any] | None = None
    backward: Any = None
    ready: list[tuple[int, Any]] = field(default_factory=list)
    launched: list[tuple[int, Any]] = field(default_factory=list)
    finished: list[tuple[int, int, Any]] = field(default_factory=list)
    computed: Any = None
    ended: Any = None


@final
class Recorder(AbstractStepObserver):
    """Keeps the last steps and returns them as timelines.

    Times of a timeline count from the start of its forward.

    Args:
        keep: Number of steps to keep.
        name: The timelines' name.
        device: The model's device; ``None`` means the host. On a GPU marks are events
            on its streams, and reading a timeline waits for the events of the steps
            kept; recording never waits.
    """

    def __init__(
        self,
        *,
        keep: int = 8,
        name: str = "measured",
        device: torch.device | None = None,
    ) -> None:
        self._name = name
        self._marks = marks_for(device)
        self._mark = self._marks.mark
        self._tensors: tuple[str, ...] = ()
        self._buckets: tuple[BucketRow, ...] = ()
        self._count = 0
        self._step = _Step()
        self._steps: deque[tuple[_Step, tuple[BucketRow, ...]]] = deque(maxlen=keep)

    @property
    def steps(self) -> tuple[tuple[StepMarks, tuple[BucketRow, ...]], ...]:
        """The steps kept and the buckets of their plan, oldest first."""
        read = self._marks.reader()
        return tuple((_values(s, read), buckets) for s, buckets in tuple(self._steps))

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The steps kept, oldest first."""
        return tuple(
            Timeline(name=self._name, spans=_spans(step, buckets))
            for step, buckets in self.steps
        )

    @property
    def timeline(self) -> Timeline | None:
        """The last step that ended, ``None`` before the first."""
        if not self._steps:
            return None
        step, buckets = self._steps[-1]
        values = _values(step, self._marks.reader())
        return Timeline(name=self._name, spans=_spans(values, buckets))

    @property
    def ready_s(self) -> dict[str, float]:
        """Ready time of each gradient of the last step, from the start of backward."""
        if not self._steps:
            return {}
        step, _ = self._steps[-1]
        read = self._marks.reader()
        backward_s = _values(step, read).backward_s
        return {self._tensors[i]: read(mark) - backward_s for i, mark in step.ready}

    def clear(self) -> None:
        """Drop the steps kept."""
        self._steps.clear()

    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:  # noqa: D102
        self._tensors = tuple(tensors)
        self._buckets = tuple(buckets)
        self._step = _Step()

    def forward_started(self, now_s: float) -> None:  # noqa: D102
        mark = self._mark(now_s)
        self._step = _Step(forward=(mark, mark))

    def forward_ended(self, now_s: float) -> None:  # noqa: D102
        mark = self._mark(now_s)
        started = self._step.forward
        self._step.forward = (mark if started is None else started[0], mark)

    def backward_started(self, now_s: float) -> None:  # noqa: D102
        if self._step.backward is None:  # a model may have several outputs
            self._step.backward = self._mark(now_s)

    def gradient_ready(self, tensor: int, now_s: float) -> None:  # noqa: D102
        self._step.ready.append((tensor, self._mark(now_s)))

    def bucket_launched(self, bucket: int, now_s: float) -> None:  # noqa: D102
        self._step.launched.append((bucket, self._mark(now_s)))

    def slice_finished(  # noqa: D102
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self._step.finished.append((bucket, lane, self._mark(now_s)))

    def backward_computed(self, now_s: float) -> None:  # noqa: D102
        self._step.computed = self._mark(now_s)

    def backward_ended(self, now_s: float) -> None:  # noqa: D102
        if self._step.forward is None:
            return  # observation began within the step
        self._step.ended = self._mark(now_s)
        self._step.number = self._count
        self._count += 1
        self._steps.append((self._step, self._buckets))


def _values(step: _Step, read: Callable[[Any], float]) -> StepMarks:
    """Return the step in seconds; a missing mark takes the previous one's value."""
    ended_s = read(step.ended)
    start_s, forward_s = map(read, step.forward or (step.ended, step.ended))
    backward_s = forward_s if step.backward is None else read(step.backward)
    return StepMarks(
        number=step.number,
        forward_s=(start_s, forward_s),
        backward_s=backward_s,
        computed_s=backward_s if step.computed is None else read(step.computed),
        ended_s=ended_s,
        launched=tuple((bucket, read(mark)) for bucket, mark in step.launched),
        finished=tuple((b, lane, read(mark)) for b, lane, mark in step.finished),
    )


def _spans(step: StepMarks, buckets: Sequence[BucketRow]) -> tuple[Span, ...]:
    origin_s = step.forward_s[0]
    return (*compute_spans(step, origin_s), *lane_spans(step, buckets, origin_s))
