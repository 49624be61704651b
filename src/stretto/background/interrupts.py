"""Call a function when a signal's handler raises, as that of Ctrl-C does.

No hook of torch reports such an error, and the program may catch it anywhere.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

_set, _get = signal.signal, signal.getsignal
_module: Any = signal


def watch_interrupts(interrupted: Callable[[], None]) -> Callable[[], None]:
    """Call ``interrupted`` before the error of a signal's handler reaches the program.

    ``signal.signal`` and ``signal.getsignal`` still take and return the program's own
    handlers. Only the main thread can set handlers: in others this does nothing.

    Returns:
        A function that ends the watch.
    """
    if not _is_main():
        return lambda: None

    @functools.wraps(_set)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        return _own(_set(signalnum, _watched(handler, interrupted)))

    @functools.wraps(_get)
    def get_handler(signalnum: Any) -> Any:
        return _own(_get(signalnum))

    def end() -> None:
        if signal.signal is set_handler:
            _module.signal, _module.getsignal = _set, _get
        if _is_main():
            _replace(_own)

    _replace(lambda handler: _watched(handler, interrupted))
    _module.signal, _module.getsignal = set_handler, get_handler
    return end


@final
class _Watched:
    """A handler that reports its errors."""

    def __init__(self, own: Any, interrupted: Callable[[], None]) -> None:
        self.own, self._interrupted = own, interrupted

    def __call__(self, *args: Any) -> Any:
        try:
            return self.own(*args)
        except BaseException:
            self._interrupted()
            raise


def _watched(handler: Any, interrupted: Callable[[], None]) -> Any:
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return handler
    return _Watched(_own(handler), interrupted)


def _own(handler: Any) -> Any:
    """Return the program's handler."""
    return handler.own if isinstance(handler, _Watched) else handler


def _replace(change: Callable[[Any], Any]) -> None:
    for number in signal.valid_signals():
        handler = _get(number)
        if (changed := change(handler)) is not handler:
            _set(number, changed)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
