"""The planner's own ranking: points in order of their predicted step time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self, final

from stretto.errors import SpecError
from stretto.tune.techniques.base import AbstractTechnique, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.tune.search_space import Point, Space
    from stretto.tune.techniques.base import SearchContext

MAX_RATIO = 1.10
"""Points predicted to be slower than the best by more than this are not proposed ..."""

MAX_DOUBTED_RATIO = 1.30
"""... or by more than the largest prediction error so far, if that is larger, up to
this."""


@final
class PredictedTechnique(AbstractTechnique):
    """The best points under the fitted model, which trials correct.

    ``predict_s`` returns a point's step time under the current model. It is called
    again for every proposal, so a corrected model reorders the untried points.
    """

    name: ClassVar[str] = "predicted"

    needs_model: ClassVar[bool] = True

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique over the search's model.

        Raises:
            SpecError: the search has no model.
        """
        if context.predict_s is None:
            raise SpecError(
                f"technique {cls.name!r} needs model=True: it ranks by the fitted model"
            )
        return cls(context.space, context.predict_s, doubt_ratio=context.doubt_ratio)

    def __init__(
        self,
        space: Space,
        predict_s: Callable[[Point], float],
        *,
        max_ratio: float = MAX_RATIO,
        doubt_ratio: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Rank the points of a space.

        ``doubt_ratio`` returns the largest prediction error so far.
        """
        self._space = space
        self._predict_s = predict_s
        self._max_ratio = max_ratio
        self._doubt_ratio = doubt_ratio
        self._tried: set[Point] = set()

    def ask(self) -> Proposal | None:
        """Return the untried point with the shortest predicted step."""
        predicted_s = {point: self._predict_s(point) for point in self._space.points}
        doubted = min(MAX_DOUBTED_RATIO, 1 + self._doubt_ratio())
        ceiling_s = min(predicted_s.values()) * max(self._max_ratio, doubted)
        left = [
            point
            for point, step_s in predicted_s.items()
            if point not in self._tried and step_s <= ceiling_s
        ]
        if not left:
            return None
        return Proposal(point=min(left, key=predicted_s.__getitem__))

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Remove the point from the ranking; the search corrects the model."""
        del step_s, mine
        self._tried.add(proposal.point)
