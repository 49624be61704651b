"""Population-based training (Jaderberg et al. 2017), on plans instead of models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, final

from stretto.errors import SpecError
from stretto.tune.techniques.base import AbstractTechnique, Proposal

if TYPE_CHECKING:
    import random

    from stretto.tune.search_space import Point, Space

MEMBERS = 6
_TRIES = 8


@final
class PopulationTechnique(AbstractTechnique):
    """A population in which the worst members copy the best and mutate.

    Members are tried in turn. After its turn, a member of the worst quarter (at least
    one) takes the point of a member of the best quarter (exploit) and moves one of its
    axes by one position, either way (explore). A point found by another technique
    replaces the worst member if it beats the best.
    """

    name: ClassVar[str] = "population"

    def __init__(
        self, space: Space, rng: random.Random, *, members: int = MEMBERS
    ) -> None:
        """Draw a population from the space.

        Raises:
            SpecError: there are fewer than two members.
        """
        if members < 2:
            raise SpecError(f"members must be >= 2, got {members}")
        self._space = space
        self._rng = rng
        drawn = rng.sample(space.points, min(members, len(space.points)))
        self._members: list[Point] = list(drawn)
        self._scores_s: list[float | None] = [None] * len(drawn)
        self._turn = 0

    def ask(self) -> Proposal | None:
        """Return the next member's point."""
        return Proposal(point=self._members[self._turn])

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Score the member, and replace it if it is among the worst."""
        if not mine:
            self._immigrate(proposal.point, step_s)
            return
        self._scores_s[self._turn] = step_s
        if None not in self._scores_s:
            self._learn(self._turn)
        self._turn = (self._turn + 1) % len(self._members)

    def _immigrate(self, point: Point, step_s: float) -> None:
        known = [math.inf if s is None else s for s in self._scores_s]
        if point in self._members or step_s >= min(known):
            return
        worst = max(range(len(known)), key=known.__getitem__)
        if worst != self._turn:  # its proposal may be under way
            self._members[worst] = point
            self._scores_s[worst] = step_s

    def _learn(self, member: int) -> None:
        scores_s = [math.inf if s is None else s for s in self._scores_s]
        ranked = sorted(range(len(scores_s)), key=scores_s.__getitem__)
        quarter = max(1, len(ranked) // 4)
        if member not in ranked[-quarter:]:
            return
        better = self._members[self._rng.choice(ranked[:quarter])]
        self._members[member] = self._explored(better)
        self._scores_s[member] = None

    def _explored(self, point: Point) -> Point:
        """Return a neighbor of a point that has another plan."""
        axes = [i for i, length in enumerate(self._space.shape) if length > 1]
        moved = point
        for _ in range(_TRIES if axes else 0):
            axis = self._rng.choice(axes)
            place = point[axis] + self._rng.choice((-1, 1))
            if not 0 <= place < self._space.shape[axis]:
                continue
            moved = self._space.canonical((*point[:axis], place, *point[axis + 1 :]))
            if moved != point:
                break
        return moved
