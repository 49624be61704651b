r"""Computation and communication on one device slow each other: LIBRA section III.

With several flows at once, each reaches the least of three: what its resource lets the
device send (the curve, ``overlapped`` beside computation), what $\gamma_k$ leaves of a
flow's rate, and its share of the link. The slowest part of a chain sets its pace: a
device slowed to 30 MB/s per flow loses nothing where the link gives each flow 20. The
other reading multiplies, share times ``overlapped`` / ``exclusive``; flows that only
wait for the link would leave part of it idle though each could send faster. Fits follow
the first (`stretto.cost.fit`): a slow-down that was measured on $k$ lanes lowers the
curve until it binds at $k$, so what was measured is predicted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.schema import ComputeContention, RateCurve

SIGMA_MIN = 0.05
"""Least rate of computation beside communication. Eq. 5 is a line fitted where it stays
well above; a sum over many flows would cross zero, and no device stops altogether."""


def compute_rate(contention: ComputeContention, load: float) -> float:
    r"""Work done per second beside communication, against 1 alone.

    $\sigma = \min(1, \max(\sigma_{min}, \alpha_1 - \alpha_2 \sum_f r_f))$

    with ``load`` $= \sum_f r_f$ over the running collectives, those in start-up
    included, $\sigma_{min}$ = `SIGMA_MIN`. Without communication the rate is 1,
    whatever $\alpha_1$. Source: LIBRA Eq. 5, there for one collective.
    """
    return min(1.0, max(SIGMA_MIN, contention.alpha1 - contention.alpha2 * load))


def curve_bytes_per_s(curve: RateCurve, resource: int) -> float:
    r"""Rate on the wire of a collective with $r$ = ``resource`` threads.

    $x(r) = \gamma_1 - \gamma_2 e^{-\gamma_3 r^{\gamma_4}}$. Source: LIBRA Eq. 6.

    Raises:
        SpecError: the curve gives no positive rate there.
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
