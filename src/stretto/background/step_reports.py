"""Count the optimizer's steps where a cluster's supervisor reads them.

Called in each rank, by `stretto.background.named_device` for a model and by
`stretto.script` for a script.
`stretto.cluster.step_reports` is the supervisor's side.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stretto import variable_names
from stretto.errors import StrettoError
from stretto.logs import get_logger
from stretto.step_counts import StepCounter
from stretto.step_hooks import reads_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

_log = get_logger(__name__)

_OTHER_STEPS = 8
"""Steps of another optimizer without one of that whose steps count so far, after which
the other's count."""

_is_installed = False


def report_steps() -> None:
    """Count this process's steps if the environment names a file, once in a process.

    A step is one of the optimizer that stepped first; a program with several, such as
    one that trains two networks in turn, counts those of one.
    """
    global _is_installed
    path = os.environ.get(variable_names.STEP_COUNTS)
    if _is_installed or not path:
        return
    _is_installed = True
    try:
        counter = StepCounter(path, int(os.environ.get("RANK") or "0"))
    except (StrettoError, OSError, ValueError) as exc:
        _log.warning("steps are not reported to %s: %s", path, exc)
        return
    hook = _Hook(counter.add)
    register_optimizer_step_pre_hook(reads_nothing(lambda *given: hook.begin(*given)))
    register_optimizer_step_post_hook(reads_nothing(hook))
    if hasattr(os, "register_at_fork"):  # such as a DataLoader's workers
        os.register_at_fork(after_in_child=hook.disable)


class _Hook:
    def __init__(self, add: Callable[[], None]) -> None:
        self._add: Callable[[], None] | None = add
        self._counted: Callable[[], Optimizer | None] = _no_optimizer
        self._others = 0
        self._begun: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def disable(self) -> None:
        """Stop counting."""
        self._add = None

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that a step begins, within another of the same optimizer or not."""
        self._begun.add(optimizer)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Count the step if it is the counted optimizer's.

        PyTorch calls hooks twice for a class whose ``step`` calls its base's, as
        Horovod's does: two steps begin, then two end. They count as one.
        """
        if self._add is None or optimizer not in self._begun:
            return
        self._begun.discard(optimizer)
        counted = self._counted()
        if counted is not optimizer:
            self._others += 1
            if counted is not None and self._others < _OTHER_STEPS:
                return
            self._counted = weakref.ref(optimizer)
        self._others = 0
        self._add()


def _no_optimizer() -> None:
    return None
