"""Least squares over a few figures with an expensive model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

STEP = 0.05
"""Width of finite differences: a model with kinks has no meaningful local slope."""

_DAMPINGS = (0.03, 0.3, 3.0)
"""Factors on the diagonal, tried in turn until a step helps. Zero is not among them:
beyond a kink a figure may matter that does not matter here, and an undamped step would
overshoot it."""

_REACH = 0.7
"""The largest move of an entry in one step."""

_GAIN_RATIO = 3e-3
"""A step that promises or brings less than this share of the cost ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The end of a search."""

    theta: Vector

    rows: Vector
    """The residuals at ``theta``."""

    @property
    def cost(self) -> float:
        """Half of the sum of the squared residuals."""
        return float(self.rows @ self.rows) / 2


def least_squares(
    residuals: Callable[[Vector], Vector],
    begin: Least,
    *,
    free: Sequence[int],
    most: float,
    steps: int,
) -> Least:
    r"""Run Levenberg-Marquardt from a point whose residuals are known.

    $\theta \leftarrow \theta - (J^T J + \lambda\, \mathrm{diag}(J^T J))^{-1} J^T r$
    with $J$ from differences over `STEP` and $\lambda$ the first of a few that lowers
    the cost, for at most ``steps`` steps. Only the entries ``free`` move, by at most
    ``most`` from 0. The search ends early when the next step promises little.

    Source: Marquardt, J. SIAM 11(2), 1963. SciPy's implementation needs one more model
    evaluation per step, and a millisecond of overhead.
    """
    here = begin
    for _ in range(steps):
        slopes = _slopes(residuals, here, free)
        chosen = np.asarray(free)
        # An entry held back by its bound must not bend the step of the others.
        outward = here.theta[chosen] * (slopes.T @ here.rows) < 0
        moving = ~(outward & (np.abs(here.theta[chosen]) >= most))
        slopes, chosen = slopes[:, moving], chosen[moving]
        normal, gradient = slopes.T @ slopes, slopes.T @ here.rows
        before = here.cost
        for damping in _DAMPINGS:
            damped = normal + damping * np.diag(np.diag(normal))
            move = np.clip(-np.linalg.solve(damped, gradient), -_REACH, _REACH)
            theta = here.theta.copy()
            theta[chosen] = np.clip(theta[chosen] + move, -most, most)
            moved = theta[chosen] - here.theta[chosen]
            promised = -float(gradient @ moved + moved @ normal @ moved / 2)
            if promised <= _GAIN_RATIO * before:
                break
            there = Least(theta=theta, rows=residuals(theta))
            if there.cost < here.cost:
                here = there
                break
        if here.cost >= before * (1 - _GAIN_RATIO):
            break
    return here


def _slopes(
    residuals: Callable[[Vector], Vector], here: Least, free: Sequence[int]
) -> Vector:
    columns = []
    for i in free:
        theta = here.theta.copy()
        # Towards 0, so that no bound is crossed.
        step = -STEP if theta[i] > 0 else STEP
        theta[i] += step
        columns.append((residuals(theta) - here.rows) / step)
    return np.stack(columns, axis=1)
