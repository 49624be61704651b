"""Hyperband (Li et al. 2017): many points for few steps, the best of them for more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import SpecError
from stretto.tune.techniques.base import LEAST_STEPS, AbstractTechnique, Proposal

if TYPE_CHECKING:
    import random

    from stretto.tune.search_space import Point, Space

MOST_STEPS = 9
FACTOR = 3


@final
class HyperbandTechnique(AbstractTechnique):
    """Halve successively in brackets from broad to deep, then start over.

    With ``R = most_steps / least_steps`` and ``s_max = floor(log_factor R)``, bracket
    ``s`` begins with ``ceil((s_max + 1) factor^s / (s + 1))`` random points measured
    over ``most_steps / factor^s`` steps each, keeps the best ``1 / factor`` of them,
    gives these ``factor`` times as many steps, and so on (Li et al., Algorithm 1).
    """

    name: ClassVar[str] = "hyperband"

    def __init__(
        self,
        space: Space,
        rng: random.Random,
        *,
        most_steps: int = MOST_STEPS,
        factor: int = FACTOR,
    ) -> None:
        """Create brackets over a space.

        Raises:
            SpecError: an option is out of range.
        """
        if most_steps < LEAST_STEPS:
            raise SpecError(f"most_steps must be >= {LEAST_STEPS}, got {most_steps}")
        if factor < 2:
            raise SpecError(f"factor must be >= 2, got {factor}")
        self._space = space
        self._rng = rng
        self._most_steps = most_steps
        self._factor = factor
        # Integer logarithm: floating point would lose whole brackets.
        self._brackets = 0
        while LEAST_STEPS * factor ** (self._brackets + 1) <= most_steps:
            self._brackets += 1
        self._bracket = self._brackets + 1
        self._waiting: list[Point] = []
        self._scored: list[tuple[float, Point]] = []
        self._steps = 0
        self._rung = 0

    def ask(self) -> Proposal | None:
        """Return the next point of the rung."""
        if not self._waiting:
            self._advance()
        return Proposal(point=self._waiting[0], steps=self._steps)

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Score a point of the rung."""
        if mine:
            self._scored.append((step_s, proposal.point))
            self._waiting.pop(0)

    def _advance(self) -> None:
        kept = len(self._scored) // self._factor
        if self._rung < self._bracket <= self._brackets and kept:
            self._rung += 1
            self._scored.sort()
            self._waiting = [point for _, point in self._scored[:kept]]
            self._steps *= self._factor
        else:
            self._bracket = self._brackets if self._bracket < 1 else self._bracket - 1
            s = self._bracket
            number = math.ceil((self._brackets + 1) * self._factor**s / (s + 1))
            number = min(number, len(self._space.points))
            self._waiting = self._rng.sample(self._space.points, number)
            self._steps = self._most_steps // self._factor**s
            self._rung = 0
        self._scored = []
