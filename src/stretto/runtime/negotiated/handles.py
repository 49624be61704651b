"""The caller's handle for a submitted request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

from stretto.errors import CommTimeout, StrettoError

if TYPE_CHECKING:
    import torch


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
            # Not yet run on a GPU.
            import torch

            for event in self._events:
                torch.cuda.current_stream().wait_event(event)
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
