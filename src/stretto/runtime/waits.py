"""Wait for collectives that may never end.

# Note [Sends that Gloo never ends]
A Gloo connection that fails reports its error to sends that wait for the receiver, and
not to those that it has begun to write: ``Pair::signalException`` looks at the wrong
member of these. A large send, or one that the loss itself interrupted, then waits for
the group's timeout, which is 30 minutes. Nothing that Python can reach ends that wait.
So a rank looks at a work every moment, and no longer waits for it once its membership
has ended. The work keeps a thread of Gloo and its tensors until the timeout.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from stretto.errors import CommTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

MOMENT = timedelta(seconds=0.1)


def why_endless(work: Any, why: Callable[[], str | None], every: timedelta) -> str:
    """Wait for a collective; return why it can't end, or "" if it has ended.

    Args:
        work: the collective.
        why: asked at times; returns why the collective can't end, or ``None``.
        every: the time between two questions.

    Raises:
        RuntimeError: the collective's own error.
    """
    while True:
        try:
            work.wait(every)
        except RuntimeError:
            if work.is_completed():
                # Its own error, if it has one: that of a wait may come just before.
                work.wait()
                return ""
        else:
            return ""
        if (found := why()) is not None:
            return found


def wait_until_over(work: Any, is_over: Callable[[], bool]) -> None:
    """Wait for a collective of ranks that may stop training together.

    Args:
        work: the collective.
        is_over: whether they have stopped.

    Raises:
        CommTimeout: they have.
        RuntimeError: the collective failed.
    """
    if why := why_endless(work, lambda: OVER if is_over() else None, MOMENT):
        raise CommTimeout(why)


OVER = "these ranks no longer train together"


@final
class BoundedGroup(dist.ProcessGroup):
    """A group whose broadcasts end with its membership, for code in C++ that waits."""

    def __init__(self, base: dist.ProcessGroup, is_over: Callable[[], bool]) -> None:
        # Only this form of the constructor lets C++ call the method below.
        super().__init__(base.rank(), base.size())  # type: ignore[call-arg]
        self._base = base
        self._is_over = is_over

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Start a broadcast of the base."""
        return _BoundedWork(self._base.broadcast(tensors, opts), self._is_over)


@final
class _BoundedWork(dist.Work):
    def __init__(self, work: Any, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._work = work
        self._is_over = is_over

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the collective, without a limit of its own."""
        del timeout
        wait_until_over(self._work, self._is_over)
        return True
