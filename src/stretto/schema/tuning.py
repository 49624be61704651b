"""Record of a tuning run: every trial, every decision and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto.schema import codec, rules

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = (
    "started",
    "remembered",
    "profiled",
    "planned",
    "tried",
    "corrected",
    "settled",
    "changed",
    "gave up",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEvent:
    """One event, and its reason."""

    step: int
    """Training steps completed on this model."""

    what: str

    why: str

    values: dict[str, Any]
    """Figures; in seconds if the name ends in ``_s``."""

    def __post_init__(self) -> None:
        rules.at_least(".step", self.step, 0)
        rules.one_of(".what", self.what, EVENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Events of one model's tuning on one rank, in order."""

    name: str

    events: tuple[TuningEvent, ...]

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Return the record in a file.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return codec.load(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the record atomically."""
        codec.save(path, self)
