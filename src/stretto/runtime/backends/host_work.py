"""Works and threads of lanes whose collectives run in Python, on the host.

# Note [Two threads per lane]
Collectives of a lane run one after another, in launch order. A future's callbacks run
on the thread that completes it, and some wait for a later collective of the same lane
(PowerSGD's last all-reduce). So a lane has two threads that take turns: while one runs
callbacks, the other executes the next collective. Gloo has two for the same reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.futures import Future

from stretto.runtime.launch import then, value_or_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch

_THREADS = 2

WAIT_OVER = "Operation timed out!"
"""The text of Gloo's error for a wait that ends before its work."""


@final
class HostWork(dist.Work):
    """A collective that a thread of its lane executes."""

    def __init__(
        self, execute: Callable[[], None], tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._execute: Callable[[], None] | None = execute
        self._tensors = list(tensors)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until the collective has ended.

        Args:
            timeout: ``None`` or zero means no limit. The collective continues after it.

        Raises:
            RuntimeError: the collective failed, or ``timeout`` passed.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise RuntimeError(WAIT_OVER)
        if self._error is not None:
            # A traceback would keep the frames of every earlier wait.
            raise self._error.with_traceback(None)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors, or of the error."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._ended.is_set():
                    self._future.set_result(self._outcome())
            future = self._future
        # A future in C++ keeps an error only if a callback raised it.
        return then(future, value_or_raise)

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; never waits."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended it, or ``None``."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors; their values are final once the work has ended."""
        return self._tensors

    def run(self) -> bool:
        """Execute the collective; return whether `complete` has to be called."""
        assert self._execute is not None  # noqa: S101
        try:
            self._execute()
        except Exception as exc:  # noqa: BLE001 - raised where the work is awaited
            self._error = exc.with_traceback(None)
        with self._lock:
            self._execute = None
            self._ended.set()
            return self._future is not None

    def complete(self) -> None:
        """Complete the future, which runs its callbacks."""
        future = self._future
        if future is not None:
            future.set_result(self._outcome())

    def _outcome(self) -> Any:
        return self._tensors if self._error is None else self._error


@final
class HostThreads:
    """Threads that execute a lane's collectives in launch order.

    They end after `close`, or once this object is gone, when everything queued before
    has ended; the last one calls ``ended``.
    """

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[HostWork | None] = queue.SimpleQueue()
        turn, alive = threading.Lock(), [_THREADS]
        for _ in range(_THREADS):
            threading.Thread(
                target=_serve,
                args=(self._jobs, turn, alive, ended),
                name=name,
                daemon=True,
            ).start()
        self._close = weakref.finalize(self, self._jobs.put, None)
        self._close.atexit = False

    def start(
        self, execute: Callable[[], None], tensors: Sequence[torch.Tensor]
    ) -> HostWork:
        """Queue a collective; ``tensors`` are kept until it has ended."""
        work = HostWork(execute, tensors)
        self._jobs.put(work)
        return work

    def close(self) -> None:
        """End the threads after the queued collectives; does not wait."""
        self._close()


def _serve(
    jobs: queue.SimpleQueue[HostWork | None],
    turn: threading.Lock,
    alive: list[int],
    ended: Callable[[], None],
) -> None:
    while True:
        with turn:
            work = _run_queued(jobs)
            if work is None:
                jobs.put(None)  # for the other thread
                alive[0] -= 1
                if alive[0] == 0:
                    ended()
                return
        with contextlib.suppress(RuntimeError):  # a callback's error is its future's
            work.complete()
        del work  # do not hold tensors while waiting


def _run_queued(jobs: queue.SimpleQueue[HostWork | None]) -> HostWork | None:
    """Execute collectives up to one with callbacks, which is returned.

    ``None`` means that the lane has been closed.
    """
    while (work := jobs.get()) is not None:
        if work.run():
            return work
        del work  # do not hold tensors while waiting
    return None
