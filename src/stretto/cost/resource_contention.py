"""Fit contention by resource, LIBRA's Eq. 5 (alpha) and Eq. 6 (gamma), to readings.

`stretto.cost.fit` fits contention by lanes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stretto.cost.contention import curve_bytes_per_s
from stretto.cost.regression import NOISE_RATIO, Fitted, standard_errors
from stretto.errors import Infeasible, SpecError
from stretto.schema import ComputeContention, Contention, RateCurve
from stretto.schema.rules import positive
from stretto.units import format_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from stretto.schema import Cluster
    from stretto.schema.samples import ContentionReadings, SlowdownReading

GAMMA4 = 0.6
"""LIBRA's empirical exponent (section III-A)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSample:
    """Transmission of a collective that takes ``resource`` threads."""

    resource: int

    wire_bytes: float
    """Bytes that crossed the busiest link: wire factor times message."""

    transmission_s: float
    """Transmission time without start-up."""

    def __post_init__(self) -> None:
        for name in ("resource", "wire_bytes", "transmission_s"):
            positive(f".{name}", getattr(self, name))

    @property
    def bytes_per_s(self) -> float:
        """Rate on the wire, bytes/s."""
        return self.wire_bytes / self.transmission_s


def fit_slowdown(samples: Iterable[SlowdownReading]) -> Fitted[ComputeContention]:
    r"""Fit $\alpha_1, \alpha_2$ of $\sigma(r) = \alpha_1 - \alpha_2 r$ (LIBRA Eq. 5).

    Minimizes $\sum_i (\sigma(r_i)\, y_i - 1)^2$ with $y$ the measured slow-down: linear
    in both, relative to the measured rate. $\alpha_2 \ge 0$.

    Raises:
        SpecError: fewer than two levels of resource.
        Infeasible: computation ran faster beside communication, beyond noise; or the
            fitted line crosses zero within the samples.
    """
    import numpy as np

    rows = list(samples)
    _levels(rows)
    slowdown = [s.compute_overlapped_s / s.compute_alone_s for s in rows]
    for sample, value in zip(rows, slowdown, strict=True):
        if value < 1 - NOISE_RATIO:
            raise Infeasible(
                f"computation took {value:.3g} times as long beside a collective of "
                f"resource {sample.resource:g}: it cannot be faster than alone. "
                "Measure again on a quiet machine"
            )
    matrix = np.array(
        [(y, -y * s.resource) for y, s in zip(slowdown, rows, strict=True)]
    )
    alpha1, alpha2 = _least_squares(matrix)
    if alpha2 < 0:
        column = matrix[:, 0]
        alpha1, alpha2 = float(column.sum() / (column @ column)), 0.0
    ratios = []
    for y, sample in zip(slowdown, rows, strict=True):
        sigma = alpha1 - alpha2 * sample.resource
        if sigma <= 0:
            raise Infeasible(
                f"the fitted rate of computation is {sigma:.3g} at resource "
                f"{sample.resource:g}, where computation did run: a line does not "
                "describe these samples. Leave out the highest levels"
            )
        ratios.append(1 / (sigma * y) - 1)
    errors = standard_errors(matrix.tolist(), ratios)
    return Fitted(
        value=ComputeContention(alpha1=alpha1, alpha2=alpha2),
        std_errors=dict(zip(("alpha1", "alpha2"), errors, strict=True)),
        residual_ratios=tuple(ratios),
    )


def fit_rate_curve(
    samples: Iterable[RateSample],
    *,
    link_bytes_per_s: float,
    gamma4: float | None = GAMMA4,
) -> Fitted[RateCurve]:
    r"""Fit $\gamma_1 \ldots \gamma_4$ of LIBRA Eq. 6, for $p$ or for $q$.

    $x(r) = \gamma_1 - \gamma_2 e^{-\gamma_3 r^{\gamma_4}}$. Minimizes
    $\sum_i (x(r_i)/x_i - 1)^2$ subject to $\gamma_1 > 0$, $\gamma_2 \ge 0$ and
    $\gamma_1 \le$ ``link_bytes_per_s``. For given $\gamma_3$ and $\gamma_4$ the other
    two come from linear least squares, so the search is over $\gamma_3$ alone, and over
    $\gamma_4$ if it is ``None`` (LIBRA sets it to 0.6).

    Raises:
        SpecError: fewer than two levels of resource (three for a free ``gamma4``).
        Infeasible: a rate above the link, or one that clearly falls as the resource
            grows.
    """
    rows = sorted(samples, key=lambda s: s.resource)
    _levels(rows, minimum=2 if gamma4 is not None else 3)
    _check_rates(rows, link_bytes_per_s)
    resources = [s.resource for s in rows]
    rates = [s.bytes_per_s for s in rows]

    def misfit(decay: float, power: float) -> float:
        return _linear_part(resources, rates, decay, power, link_bytes_per_s)[2]

    def best_decay(power: float) -> float:
        # e^-decay at the middle level ranges from almost 1 to almost 0.
        middle = math.sqrt(resources[0] * resources[-1]) ** power
        low, high = math.log(1e-4 / middle), math.log(50 / middle)
        return math.exp(
            _argmin(lambda log_decay: misfit(math.exp(log_decay), power), low, high)
        )

    power = gamma4
    if power is None:
        power = _argmin(lambda value: misfit(best_decay(value), value), 0.1, 3.0, 24)
    decay = best_decay(power)
    top, drop, _ = _linear_part(resources, rates, decay, power, link_bytes_per_s)
    curve = RateCurve(gamma1=top, gamma2=drop, gamma3=decay, gamma4=power)
    jacobian, ratios = [], []
    for resource, rate in zip(resources, rates, strict=True):
        risen = resource**power
        fall = math.exp(-decay * risen)
        row = [1 / rate, -fall / rate, drop * risen * fall / rate]
        if gamma4 is None:
            row.append(drop * decay * risen * math.log(resource) * fall / rate)
        jacobian.append(row)
        ratios.append(curve_bytes_per_s(curve, resource) / rate - 1)
    names = ("gamma1", "gamma2", "gamma3", "gamma4")
    errors = standard_errors(jacobian, ratios)
    return Fitted(
        value=curve,
        std_errors=dict(zip(names, [*errors, 0.0][:4], strict=True)),
        residual_ratios=tuple(ratios),
    )


def _least_squares(matrix: NDArray[np.float64]) -> tuple[float, ...]:
    """Solve ``matrix @ x = 1`` by least squares, with equally scaled columns."""
    import numpy as np

    scale = np.linalg.norm(matrix, axis=0)
    solution, *_ = np.linalg.lstsq(matrix / scale, np.ones(len(matrix)), rcond=None)
    return tuple(float(v) for v in solution / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionFit:
    """The three fits of LIBRA section III-A and the contention they form."""

    slowdown: Fitted[ComputeContention]

    overlapped: Fitted[RateCurve]
    """Fit of $p$: beside computation."""

    exclusive: Fitted[RateCurve]
    """Fit of $q$: alone."""

    value: Contention


def fit_contention(
    slowdowns: Iterable[SlowdownReading],
    overlapped: Iterable[RateSample],
    exclusive: Iterable[RateSample],
    *,
    link_bytes_per_s: float,
    gamma4: float | None = GAMMA4,
) -> ContentionFit:
    """Fit contention for planners, with every level at which $p$ was measured.

    Raises:
        SpecError, Infeasible: as `fit_slowdown` and `fit_rate_curve`; Infeasible also
            if the fitted slow-down leaves no computation at one of the levels.
    """
    overlapped = list(overlapped)
    line = fit_slowdown(slowdowns)
    levels = tuple(sorted({sample.resource for sample in overlapped}))
    left = line.value.alpha1 - line.value.alpha2 * levels[-1] if levels else 1.0
    if left <= 0:
        raise Infeasible(
            f"the fitted rate of computation is {left:.3g} at resource {levels[-1]}, "
            "where transmission was measured: measure computation there too"
        )
    curves = [
        fit_rate_curve(samples, link_bytes_per_s=link_bytes_per_s, gamma4=gamma4)
        for samples in (overlapped, exclusive)
    ]
    return ContentionFit(
        slowdown=line,
        overlapped=curves[0],
        exclusive=curves[1],
        value=Contention(
            compute=line.value,
            overlapped=curves[0].value,
            exclusive=curves[1].value,
            resources=levels,
        ),
    )


def fit_compute(readings: ContentionReadings) -> Fitted[ComputeContention]:
    """Fit LIBRA's alpha to readings (Eq. 5).

    Raises:
        SpecError, Infeasible: As `fit_slowdown`.
    """
    return fit_slowdown(readings.slowdowns)


def with_contention(cluster: Cluster, readings: ContentionReadings) -> Cluster:
    """Add measured contention by resource to a cluster; return the fit's quality too.

    Raises:
        SpecError: nothing was sent, so rates are unknown.
        Infeasible: the readings contradict the model or the cluster's link.
    """
    if not readings.rates:
        raise SpecError(
            "these readings come from a device without peers: they show how "
            "computation slows, but no rates. Measure with ranks (`stretto probe "
            "--resources`)"
        )
    overlapped, exclusive = (
        [
            RateSample(
                resource=reading.resource,
                wire_bytes=reading.wire_bytes,
                transmission_s=getattr(reading, name),
            )
            for reading in readings.rates
        ]
        for name in ("overlapped_s", "exclusive_s")
    )
    # A rate above the link's fitted rate means that the fitted lanes did not saturate
    # the link, and that these connections did.
    fastest = max(sample.bytes_per_s for sample in (*overlapped, *exclusive))
    link = max(cluster.bottleneck.bandwidth_bytes_per_s, fastest)
    fit = fit_contention(
        readings.slowdowns, overlapped, exclusive, link_bytes_per_s=link
    )
    return replace(
        cluster,
        contention=fit.value,
        provenance={
            **cluster.provenance,
            "contention": {
                **readings.provenance,
                "link_bytes_per_s": link,
                "slowdown": _report(fit.slowdown),
                "overlapped": _report(fit.overlapped),
                "exclusive": _report(fit.exclusive),
            },
        },
    )


def _linear_part(
    resources: Sequence[int],
    rates: Sequence[float],
    decay: float,
    power: float,
    link_bytes_per_s: float,
) -> tuple[float, float, float]:
    """Return gamma1, gamma2 and the misfit for given gamma3 and gamma4."""
    ones = [1 / rate for rate in rates]
    falls = [
        -math.exp(-decay * resource**power) / rate
        for resource, rate in zip(resources, rates, strict=True)
    ]
    aa = sum(v * v for v in ones)
    ab = sum(v * w for v, w in zip(ones, falls, strict=True))
    bb = sum(w * w for w in falls)
    a1, b1 = sum(ones), sum(falls)
    determinant = aa * bb - ab * ab
    top, drop = a1 / aa, 0.0
    if determinant > 1e-12 * aa * bb:
        drop = (aa * b1 - ab * a1) / determinant
        top = (bb * a1 - ab * b1) / determinant
    if drop < 1e-6 * top:
        top, drop = a1 / aa, 0.0
    if top > link_bytes_per_s:
        top = link_bytes_per_s
        drop = max(0.0, (b1 - ab * top) / bb) if bb else 0.0
    misfit = sum(
        (top * v + drop * w - 1) ** 2 for v, w in zip(ones, falls, strict=True)
    )
    # The curve must stay above zero wherever it was measured.
    if any(top * v + drop * w <= 0 for v, w in zip(ones, falls, strict=True)):
        misfit = math.inf
    return top, drop, misfit


def _argmin(
    function: Callable[[float], float], low: float, high: float, tries: int = 60
) -> float:
    """Return where a function of one variable is lowest: grid, then golden section."""
    grid = [low + (high - low) * i / tries for i in range(tries + 1)]
    values = [function(at) for at in grid]
    best = min(range(len(grid)), key=values.__getitem__)
    left, right = grid[max(0, best - 1)], grid[min(tries, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    one, two = right - ratio * (right - left), left + ratio * (right - left)
    at_one, at_two = function(one), function(two)
    for _ in range(50):
        if at_one <= at_two:
            right, two, at_two = two, one, at_one
            one = right - ratio * (right - left)
            at_one = function(one)
        else:
            left, one, at_one = one, two, at_two
            two = left + ratio * (right - left)
            at_two = function(two)
    return (left + right) / 2


def _check_rates(rows: Sequence[RateSample], link_bytes_per_s: float) -> None:
    for sample in rows:
        if sample.bytes_per_s > (1 + NOISE_RATIO) * link_bytes_per_s:
            raise Infeasible(
                f"a collective of resource {sample.resource:g} sent at "
                f"{format_rate(sample.bytes_per_s)} over a link of "
                f"{format_rate(link_bytes_per_s)}: check wire_bytes, start-up and the "
                "link's bandwidth"
            )
    fastest = rows[0]
    for before, sample in pairwise(rows):
        if before.bytes_per_s > fastest.bytes_per_s:
            fastest = before
        if sample.bytes_per_s < (1 - NOISE_RATIO) * fastest.bytes_per_s:
            raise Infeasible(
                f"a collective of resource {sample.resource:g} sent at "
                f"{format_rate(sample.bytes_per_s)}, one of {fastest.resource:g} at "
                f"{format_rate(fastest.bytes_per_s)}: more resource cannot send less. "
                "Measure again, or leave out the highest levels"
            )


def _levels(rows: Sequence[SlowdownReading | RateSample], *, minimum: int = 2) -> None:
    levels = {sample.resource for sample in rows}
    if len(levels) < minimum:
        raise SpecError(
            f"a fit needs samples of at least {minimum} levels of resource, got "
            f"{len(levels)}"
        )


def _report(fitted: Fitted[Contention] | Fitted[Any]) -> dict[str, Any]:
    return {
        "std_errors": {
            name: error if error < float("inf") else None
            for name, error in fitted.std_errors.items()
        },
        "residual_ratios": list(fitted.residual_ratios),
    }
