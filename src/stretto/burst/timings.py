"""A rank's measurements of its steps: layers' times, and idle time."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, final

from stretto.burst.clock import BACKWARD, FORWARD
from stretto.schema.burst import LayerTiming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.burst.clock import StepClock


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
