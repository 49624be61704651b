"""Check whether repeated measurements agree well enough to be used."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from stretto.errors import NoisyProfile
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_MAX_SPREAD_RATIO = 0.35
"""Largest accepted distance between quartiles, as a share of the median."""


def quartile_distance(values: Sequence[float]) -> float:
    """Return the distance between the quartiles; below four values, the whole range."""
    if len(values) < 4:
        return max(values) - min(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def spread_ratio(values: Sequence[float]) -> float:
    """Return `quartile_distance` as a share of the median; 0 if all values are 0."""
    middle = statistics.median(values)
    return quartile_distance(values) / middle if middle > 0 else 0.0


def require_steady(
    what: str, values: Sequence[float], *, max_spread_ratio: float, next_step: str
) -> None:
    """Require that the quartiles lie within a share of the median.

    Raises:
        NoisyProfile: names what was unsteady, by how much, and the next step.
    """
    ratio = spread_ratio(values)
    if ratio > max_spread_ratio:
        raise NoisyProfile(
            f"{what} is too unsteady to plan with: its quartiles lie "
            f"{100 * ratio:.0f} % of the median ({format_s(statistics.median(values))})"
            f" apart over {len(values)} repetitions, from {format_s(min(values))} to "
            f"{format_s(max(values))}; at most {100 * max_spread_ratio:.0f} % is "
            f"accepted. {next_step}"
        )
