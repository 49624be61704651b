from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cost import SIGMA_MIN, compute_rate, curve_bytes_per_s
from stretto.errors import SpecError
from stretto.schema import ComputeContention, RateCurve


def test_libras_published_constant_gives_its_slow_downs():
    # algorithms.md 1.2: Fig. 1a shows +38 % at 2048 threads, so 2.23 times at 4096.
    contention = ComputeContention(alpha1=1.0, alpha2=1.3445e-4)
    assert 1 / compute_rate(contention, 2048) == pytest.approx(1.38, rel=1e-3)
    assert 1 / compute_rate(contention, 4096) == pytest.approx(2.23, rel=2e-3)


@given(st.floats(0.1, 2), st.floats(0, 1), st.floats(0, 1e5), st.floats(0, 1e5))
def test_computation_never_stops_never_speeds_up_and_falls_with_load(a1, a2, one, two):
    contention = ComputeContention(alpha1=a1, alpha2=a2)
    low, high = sorted((one, two))
    assert SIGMA_MIN <= compute_rate(contention, high) <= compute_rate(contention, low)
    assert compute_rate(contention, low) <= 1


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_curve_never_falls_with_the_resource(one, two):
    curve = RateCurve(gamma1=1e9, gamma2=0.9e9, gamma3=0.02, gamma4=0.6)
    low, high = sorted((one, two))
    assert 0 < curve_bytes_per_s(curve, low) <= curve_bytes_per_s(curve, high) <= 1e9


def test_a_curve_without_a_positive_rate_is_refused():
    curve = RateCurve(gamma1=1e9, gamma2=2e9, gamma3=0.02, gamma4=0.6)
    assert curve_bytes_per_s(curve, 4096) > 0
    with pytest.raises(SpecError, match="at resource 1:"):
        curve_bytes_per_s(curve, 1)
