"""Parts of launching that are independent of plans: works, futures, slices."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch

    from stretto.runtime.bucket_schedule import Slice

    Start = Callable[[torch.Tensor, Any], Sequence[Any]]
    """Starts a bucket's collectives and gives what to ``wait()`` for, one a slice.

    Each ``wait`` raises `RuntimeError` where its collective failed, and each has
    ``get_future()``.
    """


@final
class Launched(dist.Work):
    """A launched bucket, which the Reducer reads through its future."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[Any]:
        """Return the future of the bucket's reduced buffer."""
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the future."""
        self._future.wait()
        return True


@final
class Pending:
    """A future that can be waited for with a time limit, like a work."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Return whether the future has a value or an error."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the future.

        Raises:
            RuntimeError: the future's error, or the time is over.
        """
        if timeout is not None and not self._future.done():
            ended = threading.Event()
            self._future.add_done_callback(lambda _: ended.set())
            if not ended.wait(timeout.total_seconds()):
                raise RuntimeError(f"no result in {timeout.total_seconds():g} s")
        self._future.wait()


def start_whole(reduce: Any, buffer: torch.Tensor, opts: Any) -> Sequence[Any]:
    """Start one collective for the whole bucket."""
    return (reduce([buffer], opts),)


def start_slices(
    reduces: Sequence[Any], sizes: list[int], buffer: torch.Tensor, opts: Any
) -> Sequence[Any]:
    """Start each slice on its lane."""
    return [
        reduce([piece], opts)
        for reduce, piece in zip(reduces, buffer.split(sizes), strict=True)
    ]


def done(value: Any) -> Future[Any]:
    """Return a future with a value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def launch_nothing(buffer: torch.Tensor, _opts: Any) -> dist.Work:
    """Launch nothing; used with one rank, and after a failure."""
    return Launched(done(buffer))


def stamp(finished: Any, part: Slice, future: Any) -> Any:
    """Return a slice's result and report its end to an observer."""
    now_s = perf_counter()
    value = future.value()
    finished(part.lane, part.end - part.start, now_s)
    return value


def pass_on(pending: Future[Any], ended: Any) -> None:
    """Fill a future from another one, with an error as a value."""
    try:
        value = ended.value()
    except RuntimeError as exc:
        value = exc
    pending.set_result(value)


def value_or_raise(future: Any) -> Any:
    """Return the value, or raise the error that `pass_on` stored."""
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
