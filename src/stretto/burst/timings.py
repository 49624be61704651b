"""Measure and mark how a rank spends a step: layers, waiting, everything else.

One timer runs at a time; starting one stops the previous. So a layer's backward needs
no explicit end: autograd runs layers in reverse order, and a layer's backward ends
where the next timer starts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from stretto.foreground_marks import StepMarker
from stretto.schema.burst import LayerTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

FORWARD, BACKWARD = "forward", "backward"
OTHER = ("", "other")
"""Loss, optimizer, the user's own code: everything except layers and waiting."""

WAITS = ("redistribution", "batch norm", "synchronization", "counts")
"""The waits of a rank: for samples or their gradients, statistics, a layer's gradients
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
        self.marker = StepMarker()

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
            self.marker.wait(what, finish)
        finally:
            after_s = self._now()
            self.waited_s[what] += after_s - before_s
            self._since_s += after_s - before_s


@final
class Timings:
    """Collects times of a number of steps from the clock."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._left = 0
        self._samples: dict[str, int] = {}
        self._layers: dict[tuple[str, str], list[float]] = {}
        self._waits: list[dict[str, float]] = []

    @property
    def is_on(self) -> bool:
        """Whether steps are measured now."""
        return self._left > 0

    def start(self, steps: int) -> None:
        """Discard measurements, and measure the next ``steps`` steps."""
        self._left = steps
        self._layers, self._waits = {}, []
        self._clear()

    def _clear(self) -> None:
        self._clock.spent_s.clear()
        self._clock.waited_s.clear()

    def forward_ended(self, samples: Mapping[str, int]) -> None:
        """Record how many samples of each layer this rank had."""
        self._samples = dict(samples)

    def step_ended(self) -> None:
        """Count a step: backward has ended."""
        if self._left:
            self._clock.stop()
            for key, spent_s in self._clock.spent_s.items():
                self._layers.setdefault(key, []).append(spent_s)
            self._waits.append(dict(self._clock.waited_s))
            self._left -= 1
        self._clear()

    def layers(self) -> list[LayerTiming]:
        """Return medians of the layers that this rank ran, in their order."""
        found = []
        for layer, samples in self._samples.items():
            forward = self._layers.get((layer, FORWARD))
            if samples and forward:
                backward = self._layers.get((layer, BACKWARD), [0.0])
                found.append(
                    LayerTiming(
                        layer=layer,
                        samples=samples,
                        forward_s=statistics.median(forward),
                        backward_s=statistics.median(backward),
                    )
                )
        return found

    def waiting(self) -> dict[str, float]:
        """Return median seconds of a step by kind of wait, and of their sum."""
        kinds = sorted({kind for wait in self._waits for kind in wait})
        found = {
            kind: statistics.median(wait.get(kind, 0.0) for wait in self._waits)
            for kind in kinds
        }
        if self._waits:
            found["total"] = statistics.median(sum(w.values()) for w in self._waits)
        return found
