"""Calls that may hang, with a time limit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class TimedCall(NamedTuple, Generic[_T]):
    """The state of a call at the end of its time limit."""

    ended: bool
    """Whether it returned or failed; otherwise it continues in its thread."""

    values: tuple[_T, ...]
    """Its result, or empty."""


def call_within(
    seconds: float,
    call: Callable[[], _T],
    *,
    thread_name: str,
    on_error: Callable[[Exception], None],
) -> TimedCall[_T]:
    """Call in a thread, and abandon the thread after a time limit.

    ``on_error`` gets the call's exception, in the thread, also after the limit.
    """
    found: list[_T] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - passed on
            on_error(error)
        ended.set()

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is ending and starts no more threads; run without a limit.
        run()
    is_over = ended.wait(seconds)
    return TimedCall(ended=is_over, values=tuple(found))
