"""Techniques by name: stretto's own, and those that installed packages bring.

A package adds a technique by an entry point of the group `ENTRY_POINTS`, whose name is
the technique's and whose value is its class.
"""

from __future__ import annotations

from stretto.errors import SpecError
from stretto.plugins import ClassRegistry
from stretto.tune.techniques.aiacc import (
    BayesTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
)
from stretto.tune.techniques.base import AbstractTechnique
from stretto.tune.techniques.coordinate import CoordinateTechnique
from stretto.tune.techniques.predicted import PredictedTechnique

ENTRY_POINTS = "stretto.techniques"
"""Group of entry points in which packages name their techniques."""

_TECHNIQUES = ClassRegistry(
    ENTRY_POINTS,
    AbstractTechnique,  # type: ignore[type-abstract]
    (
        PredictedTechnique,
        CoordinateTechnique,
        GridTechnique,
        PopulationTechnique,
        BayesTechnique,
        HyperbandTechnique,
    ),
)

NAMES = tuple(_TECHNIQUES.own)
"""stretto's techniques."""


def technique_of(
    technique: str | type[AbstractTechnique], *, place: str = ""
) -> type[AbstractTechnique]:
    """Return the class of a name, stretto's own before an installed one.

    A class is returned unchanged. ``place`` is where an error's value is.

    Raises:
        SpecError: there is no such technique, or its package does not load.
    """
    if isinstance(technique, type) and issubclass(technique, AbstractTechnique):
        return technique
    found = _TECHNIQUES.find(technique) if isinstance(technique, str) else None
    if found is None:
        names = ", ".join(_TECHNIQUES.names())
        raise SpecError(
            f"techniques must be different ones of {names}, or subclasses "
            f"of AbstractTechnique, got {technique!r}",
            place=place,
        )
    return found
