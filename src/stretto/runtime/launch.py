"""Works and futures of launched buckets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch


@final
class Launched(dist.Work):
    """A launched bucket, which the Reducer reads through its future."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[Any]:
        """Return the future of the bucket's reduced buffer."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether the future has a value or an error."""
        return self._future.done()

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the future, at most for the time given."""
        Pending(self._future).wait(timeout or None)
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


def done(value: Any) -> Future[Any]:
    """Return a future with a value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# Note [No callback of a future on the main thread]
# A future that has ended runs a new callback at once, from C++, on the calling thread.
# On the main thread an interrupt (Ctrl-C) may be raised in it, and the future then
# holds a bare RuntimeError, or nothing at all. So there the functions below call the
# callback themselves, where the interrupt stays a KeyboardInterrupt.


def then(
    future: Future[Any], callback: Callable[[Any], Any], *, on_host: bool = True
) -> Future[Any]:
    """Return a future of a callback's result, as ``future.then``.

    See Note [No callback of a future on the main thread]. With tensors on a device
    (``on_host=False``) it stays in C++, which sets the callback's stream.
    """
    if on_host and future.done():
        try:
            return done(callback(future))
        except RuntimeError:
            pass  # a future in C++ keeps an error only if a callback raised it
    found: Future[Any] = future.then(callback)
    return found


def when_done(
    future: Future[Any], callback: Callable[[Any], None], *, on_host: bool = True
) -> None:
    """Call a callback once a future has ended, as ``future.add_done_callback``.

    See `then`.
    """
    if on_host and future.done():
        callback(future)
    else:
        future.add_done_callback(callback)


def launch_nothing(buffer: torch.Tensor, _opts: Any) -> dist.Work:
    """Launch nothing; used with one rank, and after a failure."""
    return Launched(done(buffer))


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
