"""The interface between a tuner and the techniques that propose what to try."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from stretto.tune.search_space import Point

LEAST_STEPS = 3
"""Least number of steps whose median is a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point to try, and the number of steps to measure."""

    point: Point

    steps: int = LEAST_STEPS


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

    @abc.abstractmethod
    def ask(self) -> Proposal | None:
        """Return the next proposal."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """Add a measured step time, in seconds."""
