"""Coordinate descent from the best point known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self, final

from stretto.tune.techniques.base import AbstractTechnique, Proposal

if TYPE_CHECKING:
    from stretto.tune.search_space import Point, Space
    from stretto.tune.techniques.base import SearchContext


@final
class CoordinateTechnique(AbstractTechnique):
    """Propose neighbors of the best point, one axis after another.

    The response to lanes, unit size and resource is unimodal (AutoCCL, NSDI 2025), so
    continuing in a direction while it helps finds each axis's optimum. Without an
    untried neighbor the technique has no proposal until another technique finds a
    better point.
    """

    name: ClassVar[str] = "coordinate"

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique at the search's start, or at the first result."""
        return cls(context.space, context.start)

    def __init__(self, space: Space, start: Point | None = None) -> None:
        """Descend from ``start``, or from the first point reported."""
        self._space = space
        self._best = start
        self._best_s = math.inf
        self._tried: set[Point] = set()
        self._axis = 0
        self._direction = 1

    def ask(self) -> Proposal | None:
        """Return the next untried neighbor of the best point."""
        if self._best is None:
            return None
        if math.isinf(self._best_s) and self._best not in self._tried:
            return Proposal(point=self._best)
        for _ in range(2 * len(self._space.shape)):
            point = self._neighbor()
            if point is not None and point not in self._tried:
                return Proposal(point=point)
            self._turn()
        return None

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Move to a better point and keep the direction that led to it."""
        self._tried.add(proposal.point)
        if step_s < self._best_s:
            self._best, self._best_s = proposal.point, step_s
        elif mine:
            self._turn()

    def _neighbor(self) -> Point | None:
        """Return the next point in the current direction that has another plan."""
        best = self._best
        if best is None:
            return None
        place = best[self._axis] + self._direction
        while 0 <= place < self._space.shape[self._axis]:
            moved = self._space.canonical(
                (*best[: self._axis], place, *best[self._axis + 1 :])
            )
            if moved != best:
                return moved
            place += self._direction
        return None

    def _turn(self) -> None:
        """Switch to the other direction, then to the next axis."""
        self._direction = -self._direction
        if self._direction == 1:
            self._axis = (self._axis + 1) % len(self._space.shape)
