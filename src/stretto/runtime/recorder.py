"""What really happened in a step, as a Timeline."""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from stretto.schema import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence


class AbstractStepObserver(abc.ABC):
    """Is told what happens in a step, in `time.perf_counter` seconds.

    An implementation must return at once and must not raise: it is called between a
    gradient and its collective. `slice_finished` is called from lanes' threads, the
    others from the thread that runs forward and backward.
    """

    @abc.abstractmethod
    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:
        """A plan was applied: parameters by index, and buckets by index."""

    @abc.abstractmethod
    def forward_started(self, now_s: float) -> None:
        """Forward begins: a new step."""

    @abc.abstractmethod
    def forward_ended(self, now_s: float) -> None:
        """The model's output is there."""

    @abc.abstractmethod
    def backward_started(self, now_s: float) -> None:
        """The first gradient of the model's output is there."""

    @abc.abstractmethod
    def gradient_ready(self, tensor: int, now_s: float) -> None:
        """A parameter's gradient is there."""

    @abc.abstractmethod
    def bucket_launched(self, bucket: int, now_s: float) -> None:
        """All gradients of a bucket are there and its slices go to their lanes."""

    @abc.abstractmethod
    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        """A slice's all-reduce ended."""

    @abc.abstractmethod
    def backward_computed(self, now_s: float) -> None:
        """Backward's computation ended; communication may still run."""

    @abc.abstractmethod
    def backward_ended(self, now_s: float) -> None:
        """All gradients are reduced and in place: backward() is about to return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRow:
    """What an observer is told of a bucket when a plan is applied."""

    tensors: tuple[str, ...]

    slices: tuple[tuple[int, int], ...]
    """(lane, bytes) of each slice."""


@dataclass(slots=True)
class _Step:
    """Marks of one step, by what they mark."""

    forward_s: tuple[float, float] = (0.0, 0.0)
    backward_s: float = 0.0
    ready: list[tuple[int, float]] = field(default_factory=list)
    launched: list[tuple[int, float]] = field(default_factory=list)
    finished: list[tuple[int, int, float]] = field(default_factory=list)
    computed_s: float = 0.0
    ended_s: float = 0.0


@final
class Recorder(AbstractStepObserver):
    """Keeps the last steps and gives them as timelines.

    Times of a timeline count from the start of its forward.
    """

    def __init__(self, *, keep: int = 8, name: str = "measured") -> None:
        self._name = name
        self._tensors: tuple[str, ...] = ()
        self._buckets: tuple[BucketRow, ...] = ()
        self._step = _Step()
        self._steps: deque[tuple[_Step, tuple[BucketRow, ...]]] = deque(maxlen=keep)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The steps kept, oldest first."""
        return tuple(
            Timeline(name=self._name, spans=_spans(step, buckets))
            for step, buckets in tuple(self._steps)
        )

    @property
    def timeline(self) -> Timeline | None:
        """The last step that ended, ``None`` before the first."""
        if not self._steps:
            return None
        step, buckets = self._steps[-1]
        return Timeline(name=self._name, spans=_spans(step, buckets))

    @property
    def ready_s(self) -> dict[str, float]:
        """When each gradient of the last step was ready, from the start of backward."""
        if not self._steps:
            return {}
        step, _ = self._steps[-1]
        return {self._tensors[i]: at_s - step.backward_s for i, at_s in step.ready}

    def clear(self) -> None:
        """Forgets the steps kept."""
        self._steps.clear()

    def attached(self, tensors: Sequence[str], buckets: Sequence[BucketRow]) -> None:  # noqa: D102
        self._tensors = tuple(tensors)
        self._buckets = tuple(buckets)
        self._step = _Step()

    def forward_started(self, now_s: float) -> None:  # noqa: D102
        self._step = _Step(forward_s=(now_s, now_s))

    def forward_ended(self, now_s: float) -> None:  # noqa: D102
        self._step.forward_s = (self._step.forward_s[0], now_s)

    def backward_started(self, now_s: float) -> None:  # noqa: D102
        if self._step.backward_s == 0.0:  # a model may have several outputs
            self._step.backward_s = now_s

    def gradient_ready(self, tensor: int, now_s: float) -> None:  # noqa: D102
        self._step.ready.append((tensor, now_s))

    def bucket_launched(self, bucket: int, now_s: float) -> None:  # noqa: D102
        self._step.launched.append((bucket, now_s))

    def slice_finished(  # noqa: D102
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self._step.finished.append((bucket, lane, now_s))

    def backward_computed(self, now_s: float) -> None:  # noqa: D102
        self._step.computed_s = now_s

    def backward_ended(self, now_s: float) -> None:  # noqa: D102
        self._step.ended_s = now_s
        self._steps.append((self._step, self._buckets))


def _spans(step: _Step, buckets: Sequence[BucketRow]) -> tuple[Span, ...]:
    origin_s = step.forward_s[0]
    backward_s = step.backward_s or step.forward_s[1]
    spans = [
        _compute("forward", 0.0, step.forward_s[1] - origin_s),
        _compute("backward", backward_s - origin_s, step.computed_s - origin_s),
    ]
    launched_s = dict(step.launched)
    # Slices of one bucket on one lane end in their order, up to what can't be told.
    numbers = {
        (index, lane): [n for n, part in enumerate(row.slices) if part[0] == lane]
        for index, row in enumerate(buckets)
        for lane in {part[0] for part in row.slices}
    }
    free_s: dict[int, float] = {}
    for index, lane, end_s in sorted(step.finished, key=lambda mark: mark[2]):
        row = buckets[index]
        number = numbers[index, lane].pop(0)
        ready_s = launched_s[index]
        # When a slice's first byte left can't be seen from outside. A lane is one
        # connection, so it is drawn as if it sent its slices one after another.
        start_s = min(max(ready_s, free_s.get(lane, ready_s)), end_s)
        free_s[lane] = end_s
        name = f"bucket {index}"
        if len(row.slices) > 1:
            name += f" slice {number + 1}/{len(row.slices)}"
        args = {
            "bucket": index,
            "slice": number,
            "bytes": row.slices[number][1],
            "tensors": len(row.tensors),
        }
        marks = (ready_s - origin_s, start_s - origin_s, end_s - origin_s)
        spans += _lane_spans(f"lane{lane}", name, marks, args)
    return tuple(spans)


def _lane_spans(
    track: str, name: str, marks: tuple[float, float, float], args: dict[str, Any]
) -> list[Span]:
    ready_s, start_s, end_s = marks
    send = Span(
        track=track,
        name=name,
        start_s=start_s,
        end_s=end_s,
        args={"kind": "send", **args},
    )
    if start_s <= ready_s:
        return [send]
    wait = Span(
        track=track,
        name=f"wait {name}",
        start_s=ready_s,
        end_s=start_s,
        args={"kind": "wait", **args},
    )
    return [wait, send]


def _compute(kind: str, start_s: float, end_s: float) -> Span:
    return Span(
        track="compute",
        name=kind,
        start_s=start_s,
        end_s=max(start_s, end_s),
        args={"kind": kind},
    )
