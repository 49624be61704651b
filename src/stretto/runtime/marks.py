"""Moments of a step, taken without waiting and read after it."""

from __future__ import annotations

import abc
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class AbstractMarks(abc.ABC):
    """Takes moments while a step runs, and says later when they were.

    `mark` is called between a gradient and its collective: it must return at once and
    wait for nothing. `reader` may wait for the device; it is called between steps or
    in another thread.
    """

    @abc.abstractmethod
    def mark(self, now_s: float) -> Any:
        """This moment; ``now_s`` is the host's `time.perf_counter`."""

    @abc.abstractmethod
    def reader(self) -> Callable[[Any], float]:
        """Tells when a mark was, in seconds of the host's `time.perf_counter`."""


@final
class HostMarks(AbstractMarks):
    """The host's own time: right for a device that computes when it is told to."""

    def mark(self, now_s: float) -> Any:  # noqa: D102
        return now_s

    def reader(self) -> Callable[[Any], float]:  # noqa: D102
        return float


@final
class CudaMarks(AbstractMarks):
    """Events on the stream that is current where the mark is taken.

    In forward and backward that is the computation's stream. In a collective's
    callback it is a stream that waits for the collective, so its end is what is seen.
    Not yet run on a GPU.
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
        """Times counted back from an event recorded now.

        Events tell distances only, to some parts in ten million of their length, so
        the anchor is taken anew for each reading: then distances are a few steps
        long, and the device's clock has had no time to drift from the host's. The
        anchor is on a stream of its own and waits for nothing of the training's.
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
    """The marks that see when a device has done its work; ``None`` is the host."""
    if device is not None and device.type == "cuda":
        return CudaMarks(device)
    return HostMarks()
