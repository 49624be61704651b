"""Measure how a rank spends a step: layers, waiting, everything else.

One timer runs at a time; starting one stops the previous. So a layer's backward needs
no explicit end: autograd runs layers in reverse order, and a layer's backward ends
where the next timer starts.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

FORWARD, BACKWARD = "forward", "backward"
OTHER = ("", "other")
"""Loss, optimizer, the user's own code: everything except layers and waiting."""

WAITS = ("redistribution", "batch norm", "synchronisation", "counts")
"""What a rank waits for: samples or their gradients, statistics, a layer's gradients
over its ranks, the shares of all ranks."""


@final
class StepClock:
    """Adds up seconds by layer and pass, and by kind of wait."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._has: tuple[str, str] | None = None
        self._since_s = 0.0
        self.spent_s: dict[tuple[str, str], float] = defaultdict(float)
        self.waited_s: dict[str, float] = defaultdict(float)

    def begin(self, layer: str, part: str) -> None:
        """Start the timer of a layer's forward or backward; stop the previous one."""
        now_s = self._now()
        if self._has is not None:
            self.spent_s[self._has] += now_s - self._since_s
        self._has, self._since_s = (layer, part), now_s

    def other(self) -> None:
        """Start the timer of everything else."""
        self.begin(*OTHER)

    def stop(self) -> None:
        """Stop all timers until the next one starts."""
        self.other()
        self._has = None

    def stamp(self, output: torch.Tensor, layer: str) -> None:
        """Start a layer's backward timer when its output's gradient arrives."""
        if output.requires_grad:
            output.register_hook(lambda _grad: self.begin(layer, BACKWARD))

    def wait(self, what: str, finish: Callable[[], Any]) -> None:
        """Wait, and count the time as waiting only."""
        before_s = self._now()
        try:
            finish()
        finally:
            after_s = self._now()
            self.waited_s[what] += after_s - before_s
            self._since_s += after_s - before_s
