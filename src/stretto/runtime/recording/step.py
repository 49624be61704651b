"""Record the real events of a step as a Timeline."""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from stretto.autograd_engine import on_accumulated, queue_callback
from stretto.errors import SpecError
from stretto.runtime.torch_compat import without_dynamo
from stretto.runtime.weak_call import weakly
from stretto.schema import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMarks:
    """Times of the events in one step of one rank, in seconds of that rank's clock."""

    number: int
    """Number of backwards since recording began: the same on all ranks."""

    forward_s: tuple[float, float]

    backward_s: float
    """Time of the first gradient of the model's output."""

    computed_s: float
    """End of backward's computation."""

    ended_s: float
    """Time at which all gradients were reduced and in place."""

    launched: tuple[tuple[int, float], ...] = ()
    """(bucket, launch time of its slices)."""

    finished: tuple[tuple[int, int, float], ...] = ()
    """(bucket, lane, end of a slice's all-reduce)."""

    def shifted(self, offset_s: float) -> StepMarks:
        """Return the same step on a clock that is ahead by ``offset_s``."""
        return replace(
            self,
            forward_s=(self.forward_s[0] + offset_s, self.forward_s[1] + offset_s),
            backward_s=self.backward_s + offset_s,
            computed_s=self.computed_s + offset_s,
            ended_s=self.ended_s + offset_s,
            launched=tuple((b, s + offset_s) for b, s in self.launched),
            finished=tuple((b, n, s + offset_s) for b, n, s in self.finished),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSent:
    """One slice on its lane."""

    bucket: int
    lane: int
    number: int
    launched_s: float
    finished_s: float


def slices_sent(step: StepMarks, buckets: Sequence[BucketRow]) -> list[SliceSent]:
    """Return the slices of a step in order of their ends.

    Slices of one bucket on one lane are assumed to end in slice order.
    """
    launched_s = dict(step.launched)
    numbers = {
        (index, lane): [n for n, part in enumerate(row.slices) if part[0] == lane]
        for index, row in enumerate(buckets)
        for lane in {part[0] for part in row.slices}
    }
    return [
        SliceSent(
            bucket=bucket,
            lane=lane,
            number=numbers[bucket, lane].pop(0),
            launched_s=launched_s[bucket],
            finished_s=end_s,
        )
        for bucket, lane, end_s in sorted(step.finished, key=lambda mark: mark[2])
    ]


def compute_spans(step: StepMarks, origin_s: float) -> list[Span]:
    """Return forward and backward of a step."""
    start_s, end_s = step.forward_s
    return [
        _compute("forward", start_s - origin_s, end_s - origin_s),
        _compute("backward", step.backward_s - origin_s, step.computed_s - origin_s),
    ]


def lane_spans(
    step: StepMarks, buckets: Sequence[BucketRow], origin_s: float
) -> list[Span]:
    """Return waits and sends of a step's slices, as seen by a single rank.

    The time of a slice's first byte is not visible from outside. A lane is one
    connection, so it is drawn as if it sent its slices one after another.
    """
    spans: list[Span] = []
    free_s: dict[int, float] = {}
    for part in slices_sent(step, buckets):
        ready_s, end_s = part.launched_s, part.finished_s
        start_s = min(max(ready_s, free_s.get(part.lane, ready_s)), end_s)
        free_s[part.lane] = end_s
        name, args = slice_words(part, buckets)
        track = f"lane{part.lane}"
        if start_s > ready_s:
            spans.append(
                Span(
                    track=track,
                    name=f"wait {name}",
                    start_s=ready_s - origin_s,
                    end_s=start_s - origin_s,
                    args={"kind": "wait", **args},
                )
            )
        spans.append(
            Span(
                track=track,
                name=name,
                start_s=start_s - origin_s,
                end_s=end_s - origin_s,
                args={"kind": "send", **args},
            )
        )
    return spans


def slice_words(
    part: SliceSent, buckets: Sequence[BucketRow]
) -> tuple[str, dict[str, Any]]:
    """Return name and args of a slice's span."""
    row = buckets[part.bucket]
    name = f"bucket {part.bucket}"
    if len(row.slices) > 1:
        name += f" slice {part.number + 1}/{len(row.slices)}"
    return name, {
        "bucket": part.bucket,
        "slice": part.number,
        "bytes": row.slices[part.number][1],
        "tensors": len(row.tensors),
    }


def _compute(kind: str, start_s: float, end_s: float) -> Span:
    return Span(
        track="compute",
        name=kind,
        start_s=start_s,
        end_s=max(start_s, end_s),
        args={"kind": kind},
    )


class AbstractMarks(abc.ABC):
    """Takes marks while a step runs, and converts them to times later.

    `mark` is called between a gradient and its collective: it must return at once and
    must not wait. `reader` may wait for the device; it is called between steps or in
    another thread.
    """

    @abc.abstractmethod
    def mark(self, now_s: float) -> Any:
        """Return a mark of now; ``now_s`` is the host's `time.perf_counter`."""

    @abc.abstractmethod
    def reader(self) -> Callable[[Any], float]:
        """Return a function from a mark to the host's `time.perf_counter` seconds."""


@final
class HostMarks(AbstractMarks):
    """The host's own time: correct for a device that computes synchronously."""

    def mark(self, now_s: float) -> Any:  # noqa: D102
        return now_s

    def reader(self) -> Callable[[Any], float]:  # noqa: D102
        return float


@final
class CudaMarks(AbstractMarks):
    """Events on the current stream at the mark.

    In forward and backward that is the computation's stream. In a collective's callback
    it is a stream that waits for the collective, so the mark shows the collective's
    end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside: torch.cuda.Stream | None = None

    def mark(self, now_s: float) -> Any:  # noqa: D102
        del now_s
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reader(self) -> Callable[[Any], float]:
        """Return a function that counts back from an event recorded now.

        Events give only distances, to some parts in ten million of their length, so
        each reading takes a new anchor: then distances are a few steps long, and the
        device's clock has had no time to drift from the host's. The anchor is on a
        separate stream and waits for none of training's work.
        """
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._device)
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(self._aside)
        anchor.synchronize()
        anchor_s = perf_counter()

        def seconds(event: Any) -> float:
            event.synchronize()
            return anchor_s + float(anchor.elapsed_time(event)) / 1e3

        return seconds


def marks_for(device: torch.device | None) -> AbstractMarks:
    """Return the marks for a device's work; ``None`` means the host."""
    if device is not None and device.type == "cuda":
        return CudaMarks(device)
    return HostMarks()


class AbstractStepObserver(abc.ABC):
    """Receives the events of a step, in `time.perf_counter` seconds.

    An implementation must return at once and must not raise: it is called between a
    gradient and its collective. `slice_finished` is called from lanes' threads, the
    others from the thread that runs forward and backward.
    """

    takes_late_ends: ClassVar[bool] = False
    """Whether slices may finish after the next forward has started. If not, a forward
    plan's steps end in backward while they are observed."""

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


def require_observer(observer: object) -> None:
    """Require an observer, or None.

    Raises:
        SpecError: it is something else.
    """
    if not isinstance(observer, AbstractStepObserver | None):
        raise SpecError(
            "an observer of steps must be a stretto.runtime.AbstractStepObserver, for "
            f"instance a Recorder(), got {observer!r}"
        )


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
    has_returned: bool = False
    """Whether forward ended before backward; it may run backward itself."""
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
        if self._step.ready:
            return  # it ran backward itself
        mark = self._mark(now_s)
        started = self._step.forward
        self._step.forward = (mark if started is None else started[0], mark)
        self._step.has_returned = True

    def backward_started(self, now_s: float) -> None:  # noqa: D102
        if self._step.backward is None:  # a model may have several outputs
            self._step.backward = self._mark(now_s)

    def gradient_ready(self, tensor: int, now_s: float) -> None:  # noqa: D102
        step, mark = self._current(), self._mark(now_s)
        if step.forward is not None and not step.has_returned and not step.ready:
            step.forward = (step.forward[0], mark)
        step.ready.append((tensor, mark))

    def bucket_launched(self, bucket: int, now_s: float) -> None:  # noqa: D102
        self._current().launched.append((bucket, self._mark(now_s)))

    def _current(self) -> _Step:
        """Return a gradient's step; a second backward after a forward is one, too."""
        if self._step.ended is not None:
            ended = self._step.ended
            self._step = _Step(forward=(ended, ended))
        return self._step

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


@final
class StepWatch:
    """Converts PyTorch's hooks into an observer's calls."""

    def __init__(
        self,
        observer: AbstractStepObserver,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Install the hooks of ``model`` and of its trained ``parameters``."""
        self._observer = observer
        self._ending = False
        self._output_hooks: list[Any] = []
        # Weak, because objects kept by a parameter's hook are never freed with the
        # parameter.
        ready = weakly(self._gradient_ready)
        self._handles = [
            model.register_forward_pre_hook(self._forward_started),
            model.register_forward_hook(self._forward_ended),
            *(
                on_accumulated(parameter, partial(ready, index))
                for index, parameter in enumerate(parameters)
            ),
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        self._forget_outputs()
        for handle in self._handles:
            handle.remove()

    def _forget_outputs(self) -> None:
        for handle in self._output_hooks:
            handle.remove()
        self._output_hooks.clear()

    @without_dynamo
    def _forward_started(self, *_: Any) -> None:
        """Forward pre-hook."""
        self._ending = False
        self._observer.forward_started(perf_counter())

    @without_dynamo
    def _forward_ended(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Forward hook."""
        now_s = perf_counter()
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                handle = tensor.register_hook(self._backward_started)
                if tensor.is_leaf:  # a parameter or an input, which keeps its hooks
                    self._output_hooks.append(handle)
        self._observer.forward_ended(now_s)

    @without_dynamo
    def _backward_started(self, _gradient: torch.Tensor) -> None:
        self._observer.backward_started(perf_counter())

    @without_dynamo
    def _gradient_ready(self, index: int, _parameter: nn.Parameter) -> None:
        """Post-accumulate hook of the parameter at ``index``."""
        self._observer.gradient_ready(index, perf_counter())
        if not self._ending:
            self._ending = True
            # Runs when the graph is done, before the Reducer waits for its buckets; a
            # callback that it queues runs after that.
            queue_callback(self._computed)

    @without_dynamo
    def _computed(self) -> None:
        self._observer.backward_computed(perf_counter())
        queue_callback(self._ended)

    @without_dynamo
    def _ended(self) -> None:
        self._ending = False
        self._forget_outputs()
        self._observer.backward_ended(perf_counter())


def _tensors_in(value: Any) -> list[torch.Tensor]:
    find: Any = torch.nn.parallel.distributed._find_tensors  # noqa: SLF001
    return list(find(value))
