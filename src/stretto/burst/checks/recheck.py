"""Record forward again now and then, to find changes that no watch of values sees.

# Note [Changes that are not seen]
A capture ends when a value changes that forward reads, see `tracing.reads`. A list of
reads can't be complete: forward may call code written in C, or read a file. So forward
is recorded again, on tensors without values, and compared with the capture: after the
first few forwards, and then as often as takes at most `_SHARE` of the time. All ranks
do so in the same forward, because rank 0 announces it with the numbers that ranks
exchange.

Hooks would see tensors without values, so a model is not recorded again while its
modules have forward hooks.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import nn

from stretto.errors import SpecError, StrettoError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.burst.tracing.layers import LayerGraph

_log = get_logger(__name__)

_FIRST = frozenset((2, 4, 8, 16))
"""After these numbers of forwards of a capture it is always due."""

_SHARE = 0.01
"""Share of the time since construction that all later recordings may take."""


@dataclass
class _Known:
    """State of one capture."""

    step: int
    """Training forwards before the last one in which it was as captured."""

    forwards: int = 0

    is_recordable: bool | None = None
    """None before the first attempt."""

    error: StrettoError | None = None


@final
class Recheck:
    """Compares captures of one model with what its forward does later."""

    num_values: ClassVar[int] = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: weakref.WeakKeyDictionary[LayerGraph, _Known] = (
            weakref.WeakKeyDictionary()
        )
        self._begin_s = time.monotonic()
        self._spent_s = self._last_s = 0.0
        self._is_due = False

    # The exchange of the ranks, see `ForwardExchange`.

    def next_values(self) -> list[int]:
        """Return whether this rank has time for another recording."""
        elapsed_s = time.monotonic() - self._begin_s
        return [int(self._spent_s + self._last_s <= _SHARE * elapsed_s)]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Follow the first rank."""
        self._is_due = bool(rows[0][0])

    def __call__(self, graph: LayerGraph, step: int) -> None:
        """Record forward again if it is due; local to this rank.

        Args:
            graph: the capture that runs next.
            step: number of training forwards so far.

        Raises:
            StrettoError: forward no longer does what was captured; also raised in each
                later call.
        """
        known = self._known.get(graph)
        if known is None:
            known = self._known[graph] = _Known(step)
        if known.error is not None:
            raise known.error
        is_due = self._is_due or known.forwards in _FIRST
        known.forwards += 1
        if not is_due or known.is_recordable is False or _has_hooks(self._module):
            return
        self._is_due = False
        begin_s = time.monotonic()
        try:
            known.error = self._difference(graph, known, step)
        finally:
            self._last_s = time.monotonic() - begin_s
            self._spent_s += self._last_s
        if known.error is not None:
            raise known.error
        known.step = step

    def _difference(
        self, graph: LayerGraph, known: _Known, step: int
    ) -> StrettoError | None:
        name = type(self._module).__name__
        try:
            place = graph.difference()
        except SpecError as exc:
            if not known.is_recordable:
                known.is_recordable = False
                _log.warning(
                    "forward of %s can't be recorded again to check the capture, so "
                    "some changes of what it reads are not detected: %s",
                    name,
                    exc,
                )
                return None
            place = str(exc)
        known.is_recordable = True
        if place is None:
            return None
        return StrettoError(
            f"forward of {name} no longer does what was captured, since some step "
            f"between {known.step} and {step}: {place}. Steps since then may be wrong: "
            "go back to an earlier state, and let forward read what changes from an "
            "attribute, a buffer or an argument"
        )


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks would be called while forward is recorded."""
    kinds = nn.modules.module
    if kinds._global_forward_hooks or kinds._global_forward_pre_hooks:  # noqa: SLF001
        return True
    return any(
        not (getattr(hook, "__module__", "") or "").startswith("torch.nn.utils.")
        for part in module.modules()
        if part is not module
        for hooks in (part._forward_hooks, part._forward_pre_hooks)  # noqa: SLF001
        for hook in hooks.values()
    )
