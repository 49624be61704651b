"""Completion threads and streams: they handle the end of each collective."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stretto.logs import get_logger
from stretto.runtime.waits import wait_until_over

_log = get_logger(__name__)

Begin = Callable[[Any], Any]
"""Starts a collective on a lane and returns its work; ``None`` if it sends nothing."""

Mark = Callable[[], tuple[Any, ...]]
"""Returns what shows when the work queued so far has ended: on a GPU, an event. The end
of a request must be announced after this call only: a thread that waits for an event
that is not recorded yet does not wait at all."""

Finish = Callable[[BaseException | None, Mark], None]
"""Called when a collective has ended, with its error."""


# Note [Who waits for a lane]
# Each Gloo lane has a thread of ours that sleeps while it waits for the lane's
# collectives, and copies results out. Callbacks on Gloo's own worker threads would need
# no extra thread, but a backend joins its workers when it is released. If one thread
# holds Python's lock and the other needs it, both deadlock.


@final
class CompletionThreads:
    """Lanes whose works block the host, each with its own thread."""

    def __init__(
        self, lanes: Sequence[Any], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the threads.

        Args:
            lanes: the communicators.
            is_over: whether the ranks have stopped training together.
        """
        self._lanes = list(lanes)
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads = []
        for number in range(len(lanes)):
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_wait_in_turn,
                args=(jobs, is_over),
                name=f"stretto-lane{number}",
                daemon=True,
            )
            thread.start()
            self._queues.append(jobs)
            self._threads.append(thread)

    def send(self, lane: int, begin: Begin, finish: Finish) -> None:
        """Start a collective now; ``finish`` is called when it has ended."""
        try:
            work = begin(self._lanes[lane])
        except Exception as exc:  # noqa: BLE001
            finish(exc, _nothing)
            return
        if work is None:
            finish(None, _nothing)
            return
        self._queues[lane].put((work, finish))

    def close(self) -> None:
        """End the threads once their collectives have ended or were aborted."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._lanes.clear()


def _wait_in_turn(jobs: queue.SimpleQueue[Any], is_over: Callable[[], bool]) -> None:
    while (job := jobs.get()) is not None:
        work, finish = job
        error: BaseException | None = None
        try:
            wait_until_over(work, is_over)
        except Exception as exc:  # noqa: BLE001
            error = exc
        try:
            finish(error, _nothing)
        except Exception as exc:  # noqa: BLE001
            # Without this thread later requests would never end. `finish` handles what
            # a user can cause, and has not failed its handles if it raises.
            _log.exception("a collective ended, but its result was not delivered")
            with contextlib.suppress(Exception):
                finish(exc, _nothing)
        del job, work, finish  # do not hold a tensor while sleeping


@final
class CompletionStreams:
    """Lanes whose works order streams, each with a stream to pack and unpack.

    The engine's one thread starts collectives in the agreed order, and nothing waits on
    the host: a stream waits for the communicator's stream, and an event on it shows
    when results are in place. A failed communicator is reported by its own watchdog.
    """

    def __init__(self, lanes: Sequence[Any], device: torch.device) -> None:
        self._lanes = list(lanes)
        self._streams = [torch.cuda.Stream(device) for _ in lanes]

    def send(self, lane: int, begin: Begin, finish: Finish) -> None:
        """Start a collective now; ``finish`` queues the work that follows it."""
        with torch.cuda.stream(self._streams[lane]):
            try:
                work = begin(self._lanes[lane])
                if work is not None:
                    work.wait()
            except Exception as exc:  # noqa: BLE001
                finish(exc, _nothing)
                return
            finish(None, _recorded)

    def close(self) -> None:
        """Wait for the sent collectives and release the lanes."""
        for stream in self._streams:
            stream.synchronize()
        self._lanes.clear()


def _nothing() -> tuple[Any, ...]:
    return ()


def _recorded() -> tuple[Any, ...]:
    event = torch.cuda.Event()
    event.record()
    return (event,)
