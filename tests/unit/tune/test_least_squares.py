"""The search for the least squares against what it must find."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from stretto.tune.calibration import FitState, least_squares


def test_linear_residuals_end_at_the_normal_equations_and_count_their_looks() -> None:
    rng = np.random.default_rng(3)
    slopes, rows = rng.normal(size=(9, 4)), rng.normal(size=9)
    looks = []

    def residuals(theta: np.ndarray) -> np.ndarray:
        looks.append(theta)
        return slopes @ theta - rows

    begin = FitState(theta=np.zeros(4), rows=residuals(np.zeros(4)))
    found = least_squares(residuals, begin, free=range(4), bound=5.0, steps=9)
    best = np.linalg.lstsq(slopes, rows, rcond=None)[0]
    assert found.theta == pytest.approx(best, abs=0.02)
    assert found.cost == pytest.approx(
        np.sum((slopes @ best - rows) ** 2) / 2, rel=5e-3
    )
    assert len(looks) <= 1 + 5 * 5


def test_entries_stay_within_bounds_and_others_where_they_began() -> None:
    slopes = np.array([[1.0, 0.2, 0.5], [0.1, 1.0, 0.5], [0.3, 0.3, 2.0]])
    rows = np.array([4.0, 0.3, 1.0])

    def residuals(theta: np.ndarray) -> np.ndarray:
        return slopes @ theta - rows

    start = np.array([0.0, 0.0, 0.25])
    begin = FitState(theta=start, rows=residuals(start))
    found = least_squares(residuals, begin, free=[0, 1], bound=1.5, steps=20)
    assert found.theta[2] == 0.25
    free = lsq_linear(slopes[:, :2], rows - 0.25 * slopes[:, 2], bounds=(-1.5, 1.5))
    assert found.theta[:2] == pytest.approx(free.x, abs=0.1)
    assert np.abs(found.theta).max() <= 1.5


def test_a_start_that_is_best_stays() -> None:
    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.abs(theta) + 1.0

    begin = FitState(theta=np.zeros(2), rows=residuals(np.zeros(2)))
    assert least_squares(residuals, begin, free=[0, 1], bound=1.0, steps=5) is begin
