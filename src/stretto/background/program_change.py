"""Leave a device before this process becomes another program by ``exec``.

Its process id stays, so no other process could see that a foreground or a background
has ended.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Leaver(Protocol):
    """A foreground or a background."""

    def leave_for_exec(self) -> None:
        """Leave the device."""

    def return_from_exec(self) -> None:
        """Take the device back: the other program could not be started."""


_leavers: weakref.WeakSet[Any] = weakref.WeakSet()
_has_wrapped = False


def leave_at_exec(leaver: Leaver) -> None:
    """Make a foreground or a background leave before ``os.exec*`` in this process."""
    global _has_wrapped
    _leavers.add(leaver)
    if not _has_wrapped:
        _has_wrapped = True
        # All others of `os` call one of these.
        os.execv = _leaving(os.execv)
        os.execve = _leaving(os.execve)


def _leaving(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def leave_and_call(*args: Any, **kwargs: Any) -> Any:
        left = list(_leavers)
        for one in left:
            one.leave_for_exec()
        try:
            return call(*args, **kwargs)
        finally:
            for one in left:
                one.return_from_exec()

    return leave_and_call
