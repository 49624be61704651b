"""What a caller holds of a submitted request."""

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
        """What messages call the request."""
        self._ended = threading.Event()
        self._error: StrettoError | None = None
        self._result: torch.Tensor | None = None
        self._splits: tuple[int, ...] = ()
        self._events: tuple[Any, ...] = ()

    def poll(self) -> bool:
        """Whether it has ended, well or not; never waits."""
        return self._ended.is_set() and all(event.query() for event in self._events)

    def wait(self, timeout_s: float | None = None) -> torch.Tensor | None:
        """Sleeps until it has ended and gives `result`.

        On a GPU the current stream is made to wait; the host is not.

        Raises:
            RankDisagreement: ranks asked for different things; same text everywhere.
            CommTimeout: a rank is gone; or ``timeout_s`` passed, then it may be waited
                for again.
            StrettoError: the engine was closed.
        """
        if not self._ended.wait(timeout_s):
            raise CommTimeout(
                f"{self.place} did not end within {timeout_s:g} s: other ranks have "
                "not submitted it, or it is still being sent. Wait longer, or look at "
                "the other ranks' logs."
            )
        return self.result

    @property
    def result(self) -> torch.Tensor | None:
        """The output, ``None`` for a barrier.

        Raises:
            StrettoError: it failed, or has not ended.
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
        """All-gather and all-to-all: rows received from each rank."""
        return self._splits

    # For the engine.

    def succeed(
        self,
        result: torch.Tensor | None,
        *,
        splits: tuple[int, ...] = (),
        events: tuple[Any, ...] = (),
    ) -> None:
        """Ends it well, unless it has ended."""
        if not self._ended.is_set():
            self._result, self._splits, self._events = result, splits, events
            self._ended.set()

    def fail(self, error: StrettoError) -> None:
        """Ends it with an error, unless it has ended."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
