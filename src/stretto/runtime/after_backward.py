"""Run calls after reduced backwards, in the same order on all ranks.

# Note [Models that end in one backward]
One backward may reduce several models, for instance of a summed loss. If these are in
different process groups, DDP lets each rank finish them in a different order. Ranks
that wait for each other after each model would then wait for different models. So all
models of a backward are handled after the last Reducer has finished, sorted by a key
that is equal on all ranks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stretto.autograd_engine import graph_task_id, queue_callback
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[str, int]


class _Waiting(threading.local):
    """The calls to run at the end of this thread's backward."""

    def __init__(self) -> None:
        self.task = -1
        self.calls: list[tuple[Key, Callable[[], None]]] = []


_waiting = _Waiting()


def at_the_end(key: Key, call: Callable[[], None]) -> None:
    """Execute ``call`` after all Reducers of this backward, in key order.

    Call it from a callback of the autograd engine that was queued while Reducers were
    still active: all their callbacks run before those queued here.
    """
    task = graph_task_id()
    if task == -1:
        call()
        return
    if task != _waiting.task:
        _waiting.task = task
        _waiting.calls = []
        queue_callback(_execute)
    _waiting.calls.append((key, call))


@without_dynamo
def _execute() -> None:
    calls, _waiting.calls = _waiting.calls, []
    _waiting.task = -1
    for _, call in sorted(calls, key=lambda row: row[0]):
        call()
