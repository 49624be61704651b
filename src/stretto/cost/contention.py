r"""How computation and communication on one device slow each other: LIBRA section III.

With several flows at once, each reaches the smallest of three rates: what the device
can send at its resource (the curve, ``overlapped`` beside computation), a flow's rate
divided by $\gamma_k$, and its share of the link. The slowest part of a chain sets its
pace: a device slowed to 30 MB/s per flow loses nothing where the link gives each flow
20. The alternative would multiply the share by ``overlapped`` / ``exclusive``; flows
limited only by the link would then leave part of it idle, though each could send
faster. Fits use the minimum too (`stretto.cost.fit`): a slow-down measured on $k$ lanes
lowers the curve until it binds at $k$, so predictions reproduce the measurement.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.schema import ComputeContention, RateCurve

SIGMA_MIN = 0.05
"""Lowest rate of computation beside communication. Eq. 5 is a line fitted where the
rate is well above it; summed over many flows it would cross zero, but no device
stops."""


def compute_rate(contention: ComputeContention, load: float) -> float:
    r"""Return the work done per second beside communication, relative to 1 alone.

    $\sigma = \min(1, \max(\sigma_{min}, \alpha_1 - \alpha_2 \sum_f r_f))$

    with ``load`` $= \sum_f r_f$ over the running collectives, including those in
    start-up, and $\sigma_{min}$ = `SIGMA_MIN`. Without communication the rate is 1,
    whatever $\alpha_1$. Source: LIBRA Eq. 5, which has one collective.
    """
    return min(1.0, max(SIGMA_MIN, contention.alpha1 - contention.alpha2 * load))


def curve_bytes_per_s(curve: RateCurve, resource: int) -> float:
    r"""Return the wire rate of a collective with $r$ = ``resource`` threads.

    $x(r) = \gamma_1 - \gamma_2 e^{-\gamma_3 r^{\gamma_4}}$. Source: LIBRA Eq. 6.

    Raises:
        SpecError: the curve is not positive at this resource.
    """
    try:
        exponent = curve.gamma3 * resource**curve.gamma4
    except OverflowError:
        exponent = math.inf if curve.gamma3 else 0.0
    rate = curve.gamma1 - curve.gamma2 * math.exp(-exponent)
    if rate <= 0:
        raise SpecError(
            f"the rate curve must be > 0 at every level of resource in use, got "
            f"{rate:g} bytes/s at resource {resource}: fit gamma1 to gamma4 again or "
            "drop the level",
            place=".contention",
        )
    return rate
