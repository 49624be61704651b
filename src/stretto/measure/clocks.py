"""Moments of a step: the host's clock, or events of a CUDA stream."""

from __future__ import annotations

import abc
from time import perf_counter
from typing import Any, final

import torch


class AbstractClock(abc.ABC):
    """Records moments, and later returns the time between them.

    Recording costs little and never waits; `seconds` may wait for the device.
    """

    @abc.abstractmethod
    def mark(self) -> Any:
        """Return a moment: when the work issued before it is done."""

    @abc.abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one moment to another."""

    def is_captured(self) -> bool:
        """Return whether a CUDA graph captures what is issued now."""
        return False


@final
class HostClock(AbstractClock):
    """The host's clock, correct for devices that compute synchronously."""

    mark = staticmethod(perf_counter)

    def seconds(self, start: Any, end: Any) -> float:  # noqa: D102
        return float(end - start)


@final
class CudaClock(AbstractClock):
    """Events on the current stream."""

    def mark(self) -> Any:  # noqa: D102
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:  # noqa: D102
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def is_captured(self) -> bool:  # noqa: D102
        return torch.cuda.is_current_stream_capturing()


def clock_for(device: torch.device) -> AbstractClock:
    """Return the clock that sees when a device has finished its work."""
    return CudaClock() if device.type == "cuda" else HostClock()
