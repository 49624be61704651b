"""The interface of an engine: its options, handles and observers."""

from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from typing import Any, final

import torch

from stretto.errors import CommTimeout, SpecError, StrettoError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of an engine, equal on all its ranks.

    Raises:
        SpecError: a value breaks its rule.
    """

    lanes: int = 4
    """Communicators that transfer slices concurrently. Where one TCP flow fills about a
    third of a link, as on many clouds, four fill it; elsewhere they cost little.
    """

    unit_bytes: int = 4 * 2**20
    """Small tensors are packed up to this size; larger ones are cut into such parts."""

    cycle_s: float = 0.001
    """Shortest time between two rounds: lets small tensors accumulate while busy."""

    stall_s: float = 60.0
    """A request that waits this long for other ranks is logged in a warning."""

    known_requests: int = 1024
    """Number of names outside tensor sets whose description is cached."""

    stable_steps: int = 3
    """Steps of a tensor set in one order before it is stable; 0 disables it."""

    def __post_init__(self) -> None:
        for name in ("lanes", "unit_bytes", "known_requests"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("cycle_s", "stable_steps"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.stall_s <= 0:
            raise SpecError(f"stall_s must be > 0, got {self.stall_s:g}")


@final
class Handle:
    """One submitted request."""

    def __init__(self, place: str) -> None:
        self.place = place
        """The request's name in messages."""
        self._ended = threading.Event()
        self._error: StrettoError | None = None
        self._result: torch.Tensor | None = None
        self._splits: tuple[int, ...] = ()
        self._events: tuple[Any, ...] = ()

    def poll(self) -> bool:
        """Return whether it has ended, with or without an error; never waits."""
        return self._ended.is_set() and all(event.query() for event in self._events)

    def wait(self, timeout_s: float | None = None) -> torch.Tensor | None:
        """Sleep until the request has ended, and return `result`.

        On a GPU the current stream waits; the host does not.

        Raises:
            RankDisagreement: ranks submitted different requests; same text everywhere.
            CommTimeout: a rank is lost; or ``timeout_s`` passed, then ``wait`` may be
                called again.
            StrettoError: the engine was closed.
        """
        if not self._ended.wait(timeout_s):
            raise CommTimeout(
                f"{self.place} did not end within {timeout_s:g} s: other ranks have "
                "not submitted it, or it is still being sent. Wait longer, or check "
                "the other ranks' logs."
            )
        return self.result

    @property
    def result(self) -> torch.Tensor | None:
        """The output, ``None`` for a barrier.

        Raises:
            StrettoError: the request failed, or has not ended.
        """
        if not self._ended.is_set():
            raise StrettoError(f"{self.place} has not ended: call wait() first")
        if self._error is not None:
            raise self._error
        if self._events:
            stream = torch.cuda.current_stream(self._events[0].device)
            for event in self._events:
                stream.wait_event(event)
            if self._result is not None:
                # It was allocated on another stream, which may not reuse its memory
                # before this one has read it.
                self._result.record_stream(stream)
        return self._result

    @property
    def received_splits(self) -> tuple[int, ...]:
        """Rows received from each rank, for all-gather and all-to-all."""
        return self._splits

    # Called by the engine.

    def succeed(
        self,
        result: torch.Tensor | None,
        *,
        splits: tuple[int, ...] = (),
        events: tuple[Any, ...] = (),
    ) -> None:
        """End the request with a result, unless it has ended."""
        if not self._ended.is_set():
            self._result, self._splits, self._events = result, splits, events
            self._ended.set()

    def fail(self, error: StrettoError) -> None:
        """End the request with an error, unless it has ended."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


class AbstractEngineObserver(abc.ABC):
    """Receives spans, in `time.perf_counter` seconds.

    An implementation must return at once and must not raise; it is called from
    several threads.
    """

    @abc.abstractmethod
    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Record an activity from ``start_s`` to ``end_s``.

        ``track`` is a request's name, with ``name`` one of ``queued`` (submitted, not
        yet ready on every rank), ``pack``, ``allreduce`` and other operations; or
        ``lane0``, ``lane1``, ... with a slice's requests as ``name``; or ``rounds``
        with ``negotiate``.
        """
