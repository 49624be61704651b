"""Take time marks of a step without waiting, and read them later."""

from __future__ import annotations

import abc
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


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
    end. Not yet run on a GPU.
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
