"""Report to a background on this process's device when steps begin and when they wait.

`DistributedDataParallel`, `BurstParallel` and Horovod's `DistributedOptimizer` call
`StepMarker`, which passes the calls to the process's `ForegroundMarks`: those of each
open `stretto.Foreground`, or `NO_MARKS`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class ForegroundMarks(Protocol):
    """Receives what a training loop does; see `stretto.Foreground`."""

    def step(self, source: object = None) -> None:
        """Mark the start of a step; ``source`` is the model that begins it."""

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        """Mark the start of a wait."""

    def end_wait(self) -> None:
        """Mark its end."""

    def predict(self, source: object, windows: Sequence[Any]) -> None:
        """Set the windows that are predicted for a model's steps."""


@final
class NoMarks:
    """Ignores all marks."""

    def step(self, source: object = None) -> None:
        """Do nothing."""

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        """Do nothing."""

    def end_wait(self) -> None:
        """Do nothing."""

    def predict(self, source: object, windows: Sequence[Any]) -> None:
        """Do nothing."""


NO_MARKS = NoMarks()

_marks: ForegroundMarks = NO_MARKS


def current() -> ForegroundMarks:
    """Return the marks of this process."""
    return _marks


def set_current(marks: ForegroundMarks) -> None:
    """Send all later marks of this process to ``marks`` alone."""
    global _marks
    _marks = marks


def add(marks: ForegroundMarks) -> None:
    """Send all later marks of this process to ``marks`` too.

    A process that uses several devices leaves all of them idle while it waits.
    """
    set_current(_joined((*_receivers(), marks)))


def remove(marks: ForegroundMarks) -> None:
    """Stop sending to ``marks``."""
    set_current(_joined(tuple(one for one in _receivers() if one is not marks)))


def _receivers() -> tuple[ForegroundMarks, ...]:
    if isinstance(_marks, _SeveralMarks):
        return _marks.receivers
    return () if _marks is NO_MARKS else (_marks,)


def _joined(receivers: tuple[ForegroundMarks, ...]) -> ForegroundMarks:
    if len(receivers) > 1:
        return _SeveralMarks(receivers)
    return receivers[0] if receivers else NO_MARKS


@final
class _SeveralMarks:
    """Passes marks on to several receivers."""

    def __init__(self, receivers: tuple[ForegroundMarks, ...]) -> None:
        self.receivers = receivers

    def step(self, source: object = None) -> None:
        """Mark the start of a step."""
        for one in self.receivers:
            one.step(source)

    def begin_wait(self, what: str, *, uses_device: bool = False) -> None:
        """Mark the start of a wait."""
        for one in self.receivers:
            one.begin_wait(what, uses_device=uses_device)

    def end_wait(self) -> None:
        """Mark its end."""
        for one in self.receivers:
            one.end_wait()

    def predict(self, source: object, windows: Sequence[Any]) -> None:
        """Set the windows that are predicted for a model's steps."""
        for one in self.receivers:
            one.predict(source, windows)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: set_current(NO_MARKS))


@final
class StepMarker:
    """Marks one model's steps: from its first forward to the end of the reduction.

    An optimizer, which sees no forward, marks them from the first gradient. Micro-steps
    whose gradients are not reduced belong to the step that reduces them.
    """

    __slots__ = ("__weakref__", "_in_step", "steps", "windows")

    def __init__(self) -> None:
        self._in_step = False
        self.steps = 0
        """Steps begun so far. All ranks of the model agree on it: where ranks join or
        leave, each gets a new marker."""

        self.windows: tuple[Any, ...] = ()
        """The windows predicted for each step, a `Window` each."""

    def begin_step(self) -> None:
        """Mark the start of a step, unless one has begun."""
        if not self._in_step:
            self._in_step = True
            self.steps += 1
            _marks.step(self)

    def predict(self, windows: Sequence[Any]) -> None:
        """Set the windows that a prediction gives each step from now on."""
        self.windows = tuple(windows)
        _marks.predict(self, self.windows)

    def end_step(self) -> None:
        """Let the next forward begin a step."""
        self._in_step = False

    def wait(self, what: str, finish: Callable[[], T]) -> T:
        """Return what ``finish`` returns, and mark its time as a wait."""
        marks = _marks
        marks.begin_wait(what)
        try:
            return finish()
        finally:
            marks.end_wait()
