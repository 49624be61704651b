"""Grid search: every point once, coarse before fine."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar, final

from stretto.tune.techniques.base import AbstractTechnique, Proposal

if TYPE_CHECKING:
    from stretto.tune.search_space import Point, Space


@final
class GridTechnique(AbstractTechnique):
    """Propose all points of the space, spread out first.

    A budget rarely covers the whole grid, so points come in bit-reversed order of their
    position (van der Corput): after any number of points, those tried are spread over
    the whole grid. Points that other techniques tried are skipped.
    """

    name: ClassVar[str] = "grid"

    def __init__(self, space: Space) -> None:
        """Create the search order over a space's grid."""
        number = len(space.points)
        bits = max(1, (number - 1).bit_length())
        order = sorted(range(number), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
        self._waiting = deque(space.points[i] for i in order)
        self._tried: set[Point] = set()

    def ask(self) -> Proposal | None:
        """Return the next untried point."""
        while self._waiting and self._waiting[0] in self._tried:
            self._waiting.popleft()
        return Proposal(point=self._waiting[0]) if self._waiting else None

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Remove the point from the queue."""
        del step_s, mine
        self._tried.add(proposal.point)
