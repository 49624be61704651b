"""The contract between a tuner and the techniques that propose what to try."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from stretto.tune.space import Point

LEAST_STEPS = 3
"""Steps that a score is the median of, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point to try and how many steps its score should be the median of."""

    point: Point

    steps: int = LEAST_STEPS


class AbstractTechnique(abc.ABC):
    """Proposes points of a grid, from what was measured so far.

    **Asking.** `ask` gives the next proposal, or ``None`` when the technique has
    nothing to propose at present; it may be asked again later. It must not be asked a
    second time before its proposal was answered by `tell`.

    **Telling.** `tell` is called with every result, also those of other techniques and
    repeated ones; ``mine`` says whether it answers this technique's last proposal. A
    point that could not be run comes with infinite time.

    **Determinism.** Equal calls give equal proposals: randomness comes from a generator
    that is passed in. Points given out are canonical for the space.
    """

    name: ClassVar[str]
    """Under which reports and options know the technique."""

    @abc.abstractmethod
    def ask(self) -> Proposal | None:
        """The next proposal."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        """A measured step time, in seconds."""
