"""Where a rank's time goes in a step: layers, waiting, everything else.

One thing at a time has the clock: what begins takes it from what had it. Layers'
backward needs no end of its own this way: autograd runs layers in reverse order, so a
layer's ends where the next thing begins.
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
"""Loss, optimizer, the user's own code: whatever is no layer and no waiting."""

WAITS = ("redistribution", "batch norm", "synchronisation", "counts")
"""What a rank waits for: samples or their gradients, statistics, a layer's gradients
over its ranks, the shares that all ranks came with."""


@final
class StepClock:
    """Adds up seconds by layer and pass, and by what is waited for."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._has: tuple[str, str] | None = None
        self._since_s = 0.0
        self.spent_s: dict[tuple[str, str], float] = defaultdict(float)
        self.waited_s: dict[str, float] = defaultdict(float)

    def begin(self, layer: str, part: str) -> None:
        """A layer's forward or backward begins, and what had the clock ends."""
        now_s = self._now()
        if self._has is not None:
            self.spent_s[self._has] += now_s - self._since_s
        self._has, self._since_s = (layer, part), now_s

    def other(self) -> None:
        """No layer any more."""
        self.begin(*OTHER)

    def stop(self) -> None:
        """Nothing has the clock until the next beginning."""
        self.other()
        self._has = None

    def stamp(self, output: torch.Tensor, layer: str) -> None:
        """Lets a layer's backward begin when the gradient of its output is there."""
        if output.requires_grad:
            output.register_hook(lambda _grad: self.begin(layer, BACKWARD))

    def wait(self, what: str, finish: Callable[[], Any]) -> None:
        """Waits, and counts that for the waiting alone."""
        before_s = self._now()
        try:
            finish()
        finally:
            after_s = self._now()
            self.waited_s[what] += after_s - before_s
            self._since_s += after_s - before_s
