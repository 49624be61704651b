"""What reproducing a paper gives: figures, corrections, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of ours beside the published one."""

    table: str
    """Where the paper has it."""

    name: str

    ours: float

    unit: str = ""
    """``s``, ``%``, or nothing for a plain number."""

    published: float | None = None

    published_high: float | None = None
    """Where the paper gives a range, its upper end."""

    tolerance: float | None = None
    """Largest relative error at which it counts as reached; ``None``: no target."""

    at_most: bool = False
    """Anything below the published figure counts as reached too."""

    note: str = ""
    """What was assumed, or why it is missed."""

    @property
    def error(self) -> float | None:
        """Relative difference from the published figure, 0 within a range."""
        if self.published is None:
            return None
        low, high = self.published, self.published_high
        nearest = min(max(self.ours, low), high) if high is not None else low
        if self.at_most:
            nearest = min(nearest, self.ours)
        return (self.ours - nearest) / abs(nearest) if nearest else self.ours - nearest

    @property
    def reached(self) -> bool | None:
        """Whether it lies within its tolerance; ``None`` without a target."""
        error = self.error
        if error is None or self.tolerance is None:
            return None
        return abs(error) <= self.tolerance + 1e-9

    def as_dict(self) -> dict[str, Any]:
        """The figure with its error, for JSON."""
        return {
            "table": self.table,
            "name": self.name,
            "ours": self.ours,
            "published": self.published,
            "published_high": self.published_high,
            "unit": self.unit,
            "error": self.error,
            "tolerance": self.tolerance,
            "reached": self.reached,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A defect of the paper with the reading to use."""

    where: str

    defect: str

    reading: str

    shown: str = ""
    """A counterexample, computed when asked for."""

    holds: bool | None = None
    """Whether the computed counterexample says so; ``None``: none is computed."""

    def as_dict(self) -> dict[str, Any]:
        """The correction, for JSON."""
        return {
            "where": self.where,
            "defect": self.defect,
            "reading": self.reading,
            "shown": self.shown,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Several curves over one axis, as a figure draws them."""

    title: str

    axis: str

    x: tuple[int, ...]

    columns: dict[str, tuple[float, ...]]

    unit: str = ""

    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The curves, for JSON."""
        return {
            "title": self.title,
            "axis": self.axis,
            "x": list(self.x),
            "columns": {name: list(values) for name, values in self.columns.items()},
            "unit": self.unit,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What can't be recomputed here, and why."""

    item: str

    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The item and its reason, for JSON."""
        return {"item": self.item, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A paper's tables as they can be recomputed."""

    paper: str

    title: str

    assumed: tuple[str, ...]

    figures: tuple[Figure, ...]

    series: tuple[Series, ...] = ()

    corrections: tuple[Correction, ...]

    left: tuple[Left, ...]

    @property
    def missed(self) -> tuple[Figure, ...]:
        """The figures that lie outside their tolerance."""
        return tuple(f for f in self.figures if f.reached is False)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "paper": self.paper,
            "title": self.title,
            "assumed": list(self.assumed),
            "figures": [x.as_dict() for x in self.figures],
            "series": [x.as_dict() for x in self.series],
            "corrections": [x.as_dict() for x in self.corrections],
            "left": [x.as_dict() for x in self.left],
            "reached": sum(x.reached is True for x in self.figures),
            "missed": len(self.missed),
        }
