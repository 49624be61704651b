"""What reproducing a paper gives: figures, corrections, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCES = ("published", "derived", "repository", "target")
"""Where a reference is from: printed in the paper; computed from what is printed there;
from the authors' repository; a target of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of ours beside its reference."""

    table: str
    """Where the reference is to be found: the paper's table, figure or section."""

    name: str

    ours: float

    unit: str = ""
    """``s``, ``%``, or nothing for a plain number."""

    reference: float | None = None

    reference_high: float | None = None
    """Where the reference is a range, its upper end."""

    source: str | None = None
    """One of `SOURCES`; ``None`` without a reference."""

    identity: bool = False
    """Whether ours follows from the same numbers, or from a constant fitted to the
    reference: agreement then says nothing of the model, and is not counted."""

    tolerance: float | None = None
    """Largest relative error at which it counts as reached; ``None``: no target."""

    at_most: bool = False
    """Anything below the reference counts as reached too."""

    at_least: bool = False
    """Anything above the reference counts as reached too."""

    note: str = ""
    """What was assumed, or why it is missed."""

    def __post_init__(self) -> None:
        if (self.source in SOURCES) != (self.reference is not None):
            raise AssertionError(f"{self.name}: a reference needs one of {SOURCES}")

    @property
    def error(self) -> float | None:
        """Relative difference from the reference, 0 within a range."""
        if self.reference is None:
            return None
        low, high = self.reference, self.reference_high
        nearest = min(max(self.ours, low), high) if high is not None else low
        if self.at_most:
            nearest = min(nearest, self.ours)
        if self.at_least:
            nearest = max(nearest, self.ours)
        return (self.ours - nearest) / abs(nearest) if nearest else self.ours - nearest

    @property
    def within(self) -> bool | None:
        """Whether it lies within its tolerance; ``None`` without a target."""
        error = self.error
        if error is None or self.tolerance is None:
            return None
        return abs(error) <= self.tolerance + 1e-9

    @property
    def reached(self) -> bool | None:
        """Whether a reference that could be missed is; ``None`` for others."""
        return None if self.identity else self.within

    def as_dict(self) -> dict[str, Any]:
        """The figure with its error, for JSON."""
        return {
            "table": self.table,
            "name": self.name,
            "ours": self.ours,
            "reference": self.reference,
            "reference_high": self.reference_high,
            "source": self.source,
            "identity": self.identity,
            "at_most": self.at_most,
            "at_least": self.at_least,
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

    def counts(self) -> dict[str, dict[str, int]]:
        """By source: figures reached and missed, and those without a tolerance.

        ``identity`` counts apart what holds by construction.
        """
        found: dict[str, dict[str, int]] = {}
        for figure in self.figures:
            if figure.source is None:
                continue
            source, state = figure.source, {True: "reached", False: "missed"}
            if figure.identity:
                source = "identity"
                state = {True: "holds", False: "differs"}
            row = found.setdefault(source, {})
            key = "without a tolerance"
            if figure.within is not None:
                key = state[figure.within]
            row[key] = row.get(key, 0) + 1
        return found

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
            "counts": self.counts(),
        }
