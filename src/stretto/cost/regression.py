"""The result type of all fits: a value, its uncertainty and its residuals."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Value = TypeVar("Value")

NOISE_RATIO = 0.15
"""Tolerance for measured times that contradict physics."""

_SINGULAR = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[Value]):
    """A fitted value with its uncertainty and residuals."""

    value: Value

    std_errors: dict[str, float]
    """Standard error of each parameter, in its unit: roots of the diagonal of
    $s^2 (J^T J)^{-1}$. Infinite where the samples do not determine the parameter."""

    residual_ratios: tuple[float, ...]
    """Predicted / measured - 1 for each sample, in the samples' order."""

    @property
    def mean_error_ratio(self) -> float:
        """Mean absolute relative error over the samples (MAPE / 100)."""
        return statistics.fmean(abs(value) for value in self.residual_ratios)

    @property
    def worst_error_ratio(self) -> float:
        """Largest absolute relative error over the samples."""
        return max(abs(value) for value in self.residual_ratios)


def standard_errors(
    jacobian: Sequence[Sequence[float]] | NDArray[np.float64],
    residuals: Sequence[float] | NDArray[np.float64],
) -> list[float]:
    r"""Return roots of the diagonal of $s^2 (J^T J)^{-1}$, $s^2 = \sum_i e_i^2 /
    (n-p)$.

    Infinite for a parameter that no sample depends on. Infinite for all if there are no
    more samples than parameters, or if the samples cannot separate the parameters.
    """
    import numpy as np

    matrix = np.asarray(jacobian, dtype=float)
    # Scale columns of different units before comparing them.
    scale = np.linalg.norm(matrix, axis=0)
    decided = scale > 0
    errors = np.full(len(scale), math.inf)
    freedom = len(matrix) - int(decided.sum())
    unit = matrix[:, decided] / scale[decided]
    if freedom > 0 and unit.size and np.linalg.cond(unit) < _SINGULAR:
        variance = float(np.sum(np.square(residuals))) / freedom
        covariance = variance * np.linalg.inv(unit.T @ unit)
        errors[decided] = np.sqrt(np.diag(covariance)) / scale[decided]
    return [float(value) for value in errors]
