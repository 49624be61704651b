"""Results of reproducing a paper: figures, corrections, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCES = ("published", "derived", "repository", "target")
"""Source of a reference: printed in the paper, computed from what is printed there,
taken from the authors' repository, or our own target.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One of our figures beside its reference."""

    table: str
    """Place of the reference: the paper's table, figure or section."""

    name: str

    ours: float

    unit: str = ""
    """``s``, ``%``, or nothing for a plain number."""

    reference: float | None = None

    reference_high: float | None = None
    """Upper end, if the reference is a range."""

    source: str | None = None
    """One of `SOURCES`; ``None`` without a reference."""

    identity: bool = False
    """Whether our figure follows from the same numbers, or from a constant fitted to
    the reference. Agreement then does not test the model, and is not counted.
    """

    tolerance: float | None = None
    """Largest relative error within tolerance; ``None``: no target."""

    at_most: bool = False
    """Whether anything below the reference is within tolerance too."""

    at_least: bool = False
    """Whether anything above the reference is within tolerance too."""

    note: str = ""
    """The assumption, or why the figure is outside its tolerance."""

    def __post_init__(self) -> None:
        if (self.source in SOURCES) != (self.reference is not None):
            raise AssertionError(f"{self.name}: a reference needs one of {SOURCES}")

    @property
    def error(self) -> float | None:
        """Return the relative difference from the reference, 0 within a range."""
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
        """Return whether the figure is within tolerance; ``None`` without a target."""
        error = self.error
        if error is None or self.tolerance is None:
            return None
        return abs(error) <= self.tolerance + 1e-9

    @property
    def reached(self) -> bool | None:
        """Return whether it is within tolerance; ``None`` if it cannot miss."""
        return None if self.identity else self.within

    def as_dict(self) -> dict[str, Any]:
        """Return the figure with its error, for JSON."""
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
    """A defect of the paper, and the corrected reading."""

    where: str

    defect: str

    reading: str

    shown: str = ""
    """A counterexample, computed on request."""

    holds: bool | None = None
    """Whether the counterexample confirms the defect; ``None``: none is computed."""

    def as_dict(self) -> dict[str, Any]:
        """Return the correction, for JSON."""
        return {
            "where": self.where,
            "defect": self.defect,
            "reading": self.reading,
            "shown": self.shown,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Several curves over one axis, as in a figure."""

    title: str

    axis: str

    x: tuple[int, ...]

    columns: dict[str, tuple[float, ...]]

    unit: str = ""

    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the curves, for JSON."""
        return {
            "title": self.title,
            "axis": self.axis,
            "x": list(self.x),
            "columns": {name: list(values) for name, values in self.columns.items()},
            "unit": self.unit,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """An item that cannot be recomputed here, and the reason."""

    item: str

    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the item and its reason, for JSON."""
        return {"item": self.item, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A paper's recomputed tables."""

    paper: str

    title: str

    assumed: tuple[str, ...]

    figures: tuple[Figure, ...]

    series: tuple[Series, ...] = ()

    corrections: tuple[Correction, ...]

    left: tuple[Omission, ...]

    @property
    def missed(self) -> tuple[Figure, ...]:
        """Return the figures outside their tolerance."""
        return tuple(f for f in self.figures if f.reached is False)

    def counts(self) -> dict[str, dict[str, int]]:
        """Count, by source, figures reached, missed, and without a tolerance.

        ``identity`` counts separately the figures that agree by construction.
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
        """Return all of it, for JSON."""
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
