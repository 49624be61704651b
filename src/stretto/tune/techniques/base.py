"""The interface between a tuner and the techniques that propose what to try."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from stretto.tune.search_space import Point, Space

MIN_STEPS = 3
"""Smallest number of steps whose median is a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point to try, and the number of steps to measure."""

    point: Point

    steps: int = MIN_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The inputs that a search gives to its techniques."""

    space: Space
    """The points that may be proposed."""

    seed: int = 0
    """The search's seed, `TuneOptions.seed`."""

    rng: random.Random
    """A generator with that seed, which the search's techniques share."""

    start: Point | None = None
    """Where to begin; ``None`` if the search begins with the model's plan."""

    predict_s: Callable[[Point], float] | None = None
    """A point's step time under the current model; ``None`` without a model."""

    doubt_ratio: Callable[[], float] = lambda: 0.0
    """The largest prediction error so far, as a share of the measured time."""


class AbstractTechnique(abc.ABC):
    """Proposes points of a grid from the measurements so far.

    **Asking.** `ask` returns the next proposal, or ``None`` if the technique has
    nothing to propose at present; it may be asked again later. It must not be asked
    again before its proposal was answered by `tell`.

    **Telling.** `tell` is called with every result, including repeated ones and those
    of other techniques; ``mine`` is true if it answers this technique's last proposal.
    A point that could not be run has infinite time.

    **Determinism.** Equal calls give equal proposals: randomness comes from a generator
    that is passed in. Returned points are canonical for the space.
    """

    name: ClassVar[str]
    """The technique's name in reports and options."""

    needs_model: ClassVar[bool] = False
    """Whether it needs `SearchContext.predict_s`."""

    @classmethod
    def of(cls, context: SearchContext) -> Self:
        """Return the technique for one search.

        By default the constructor gets the space only. Overridden to pass more of the
        context, or options of the technique.
        """
        make: Any = cls  # whose constructor takes a space
        made: Self = make(context.space)
        return made

    @abc.abstractmethod
    def ask(self) -> Proposal | None:
        """Return the next proposal."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Add a measured step time, in seconds."""
