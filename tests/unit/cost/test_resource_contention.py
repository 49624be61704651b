from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost import curve_bytes_per_s
from stretto.cost.regression import standard_errors
from stretto.cost.resource_contention import (
    RateSample,
    fit_contention,
    fit_rate_curve,
    fit_slowdown,
)
from stretto.errors import Infeasible, SpecError
from stretto.schema import RateCurve
from stretto.schema.samples import SlowdownReading

LEVELS = (128, 256, 512, 1024, 2048, 4096)


def slowdown(resource, alone_s, overlapped_s):
    return SlowdownReading(
        resource=resource,
        compute_alone_s=alone_s,
        compute_overlapped_s=overlapped_s,
        spread_ratio=0.0,
        repetitions=1,
    )


def slowdowns(alpha1, alpha2, *, noise=0.0, seed=0, levels=LEVELS):
    rng = random.Random(seed)
    return [
        slowdown(r, 0.01, 0.01 / (alpha1 - alpha2 * r) * (1 + rng.gauss(0, noise)))
        for r in levels
    ]


def rates(curve, *, noise=0.0, seed=0, levels=LEVELS):
    rng = random.Random(seed)
    return [
        RateSample(
            resource=r,
            wire_bytes=1e8,
            transmission_s=1e8
            / (curve.gamma1 - curve.gamma2 * math.exp(-curve.gamma3 * r**curve.gamma4))
            * (1 + rng.gauss(0, noise)),
        )
        for r in levels
    ]


@given(st.floats(0.9, 1.0), st.floats(0, 1.8e-4))
def test_the_line_of_slow_downs_is_recovered(alpha1, alpha2):
    fit = fit_slowdown(slowdowns(alpha1, alpha2))
    assert fit.value.alpha1 == pytest.approx(alpha1, rel=1e-9)
    assert fit.value.alpha2 == pytest.approx(alpha2, rel=1e-6, abs=1e-12)
    assert fit.worst_error_ratio < 1e-9


def test_uncertainty_covers_what_noise_does():
    # LIBRA's published constant, 2 % noise: four standard errors hold.
    for seed in range(20):
        fit = fit_slowdown(slowdowns(1.0, 1.3445e-4, noise=0.02, seed=seed))
        assert abs(fit.value.alpha1 - 1.0) < 5 * fit.std_errors["alpha1"]
        assert abs(fit.value.alpha2 - 1.3445e-4) < 5 * fit.std_errors["alpha2"]


def test_noise_that_rises_gives_no_speed_up_from_contention():
    samples = slowdowns(0.95, -1e-5, levels=(128, 4096))
    fit = fit_slowdown(samples)
    assert fit.value.alpha2 == 0
    assert 0.95 <= fit.value.alpha1 <= 1.0


def test_computation_faster_than_alone_is_refused():
    samples = [*slowdowns(1.0, 1e-4), *slowdowns(1.3, 0.0, levels=(64,))]
    with pytest.raises(Infeasible, match="cannot be faster than alone"):
        fit_slowdown(samples)


def test_a_line_that_crosses_zero_among_the_samples_is_refused():
    samples = slowdowns(1.2, 0.2, levels=(1, 2, 3, 4, 5)) * 100
    last = slowdown(7, 1.0, 5.0)
    with pytest.raises(Infeasible, match="at resource 7, where computation did run"):
        fit_slowdown([*samples, last])


curves = st.builds(
    RateCurve,
    gamma1=st.floats(1e9, 6e9),
    gamma2=st.floats(1e8, 9e8),
    gamma3=st.floats(0.01, 0.05),
    gamma4=st.just(0.6),
)


@settings(max_examples=30, deadline=None)
@given(curves)
def test_a_curve_is_recovered_where_it_was_measured(curve):
    fit = fit_rate_curve(rates(curve), link_bytes_per_s=1e10)
    assert fit.worst_error_ratio < 1e-5
    for r in LEVELS:
        assert curve_bytes_per_s(fit.value, r) == pytest.approx(
            curve_bytes_per_s(curve, r), rel=1e-5
        )
    assert fit.value.gamma4 == 0.6
    assert fit.std_errors["gamma4"] == 0.0


def test_the_exponent_may_be_fitted_too():
    curve = RateCurve(gamma1=5e9, gamma2=4.5e9, gamma3=0.004, gamma4=0.9)
    fit = fit_rate_curve(rates(curve), link_bytes_per_s=1e10, gamma4=None)
    assert fit.value.gamma4 == pytest.approx(0.9, rel=0.02)
    fixed = fit_rate_curve(rates(curve), link_bytes_per_s=1e10)
    assert fit.mean_error_ratio < fixed.mean_error_ratio


def test_noisy_rates_give_a_near_curve_with_its_uncertainty():
    curve = RateCurve(gamma1=5e9, gamma2=4.5e9, gamma3=0.03, gamma4=0.6)
    samples = [
        sample
        for seed in range(5)
        for sample in rates(curve, noise=0.02, seed=seed, levels=(8, 32, *LEVELS))
    ]
    fit = fit_rate_curve(samples, link_bytes_per_s=1e10)
    assert fit.mean_error_ratio < 0.03
    for name in ("gamma1", "gamma2", "gamma3"):
        truth, found = getattr(curve, name), getattr(fit.value, name)
        assert abs(found - truth) < 5 * fit.std_errors[name] < truth


def test_equal_rates_are_a_constant():
    flat = RateCurve(gamma1=3e9, gamma2=0.0, gamma3=0.0, gamma4=0.6)
    fit = fit_rate_curve(rates(flat), link_bytes_per_s=1e10)
    for r in LEVELS:
        assert curve_bytes_per_s(fit.value, r) == pytest.approx(3e9, rel=1e-6)
    assert math.isinf(fit.std_errors["gamma3"])


def test_no_curve_exceeds_the_link():
    curve = RateCurve(gamma1=5e9, gamma2=4.5e9, gamma3=0.03, gamma4=0.6)
    fit = fit_rate_curve(rates(curve), link_bytes_per_s=4.8e9)
    assert fit.value.gamma1 <= 4.8e9
    with pytest.raises(Infeasible, match="over a link of"):
        fit_rate_curve(rates(curve), link_bytes_per_s=4e9)


def test_rates_that_fall_with_the_resource_are_refused():
    curve = RateCurve(gamma1=5e9, gamma2=0.0, gamma3=0.0, gamma4=0.6)
    slow = RateCurve(gamma1=4e9, gamma2=0.0, gamma3=0.0, gamma4=0.6)
    samples = rates(curve) + rates(slow, levels=(8192,))
    with pytest.raises(Infeasible, match="more resource cannot send less"):
        fit_rate_curve(samples, link_bytes_per_s=1e10)


def test_bad_samples_are_named():
    with pytest.raises(SpecError, match="2 levels of resource, got 1"):
        fit_slowdown(slowdowns(1.0, 1e-4, levels=(128,)))
    with pytest.raises(SpecError, match="3 levels of resource, got 2"):
        fit_rate_curve(
            rates(RateCurve(gamma1=1e9, gamma2=0, gamma3=0, gamma4=1), levels=(1, 2)),
            link_bytes_per_s=1e10,
            gamma4=None,
        )
    with pytest.raises(SpecError, match="transmission_s must be finite and > 0"):
        RateSample(resource=1, wire_bytes=1.0, transmission_s=math.nan)
    with pytest.raises(SpecError, match="compute_alone_s must be finite and > 0"):
        slowdown(1, -1.0, 1.0)


def test_standard_errors_are_those_of_a_straight_line():
    # Closed form: s / sqrt(sum (x - mean)^2) for the slope.
    x, residuals = [0.0, 1.0, 2.0, 3.0], [0.1, -0.2, 0.1, 0.0]
    s2 = sum(r * r for r in residuals) / 2
    errors = standard_errors([(1.0, v) for v in x], residuals)
    assert errors[1] == pytest.approx(math.sqrt(s2 / 5.0), rel=1e-12)
    assert errors[0] == pytest.approx(math.sqrt(s2 * (1 / 4 + 2.25 / 5)), rel=1e-12)
    assert standard_errors([(1.0, 2.0)], [0.0]) == [math.inf, math.inf]
    assert standard_errors([(1.0, 2.0)] * 3, [0.0] * 3) == [math.inf, math.inf]


def test_three_fits_make_a_contention():
    beside = RateCurve(gamma1=4.5e9, gamma2=4e9, gamma3=0.03, gamma4=0.6)
    alone = RateCurve(gamma1=5e9, gamma2=4.4e9, gamma3=0.03, gamma4=0.6)
    fit = fit_contention(
        slowdowns(1.0, 1.3445e-4),
        rates(beside),
        rates(alone),
        link_bytes_per_s=6.25e9,
    )
    assert fit.value.resources == LEVELS
    assert fit.value.compute.alpha2 == pytest.approx(1.3445e-4, rel=1e-6)
    for found, truth in (
        (fit.value.overlapped, beside),
        (fit.value.exclusive, alone),
    ):
        assert curve_bytes_per_s(found, 512) == pytest.approx(
            curve_bytes_per_s(truth, 512), rel=1e-4
        )
    with pytest.raises(Infeasible, match="measure computation there too"):
        fit_contention(
            slowdowns(1.0, 2e-4, levels=(128, 256)),
            rates(beside, levels=(128, 8192)),
            rates(alone),
            link_bytes_per_s=6.25e9,
        )
