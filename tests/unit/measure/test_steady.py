from __future__ import annotations

import pytest

from stretto.errors import NoisyProfile
from stretto.measure.steady import quartile_distance, require_steady, spread_ratio


def test_equal_values_have_no_spread():
    assert quartile_distance([2.0] * 7) == 0
    assert spread_ratio([2.0] * 7) == 0


def test_one_outlier_among_many_does_not_widen_the_quartiles():
    values = [1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.0, 1.01, 50.0]
    assert quartile_distance(values) < 0.05


def test_fewer_than_four_values_count_with_their_whole_range():
    assert quartile_distance([1.0, 3.0, 2.0]) == 2.0


def test_unsteady_values_are_refused_with_what_how_much_and_what_next():
    with pytest.raises(NoisyProfile) as raised:
        require_steady(
            "the time of backward",
            [0.1, 0.2, 0.1, 0.2, 0.1, 0.2],
            max_spread_ratio=0.35,
            next_step="Try again.",
        )
    text = str(raised.value)
    assert "the time of backward" in text
    assert "35 %" in text
    assert "Try again." in text


def test_steady_values_are_accepted():
    require_steady("it", [0.1, 0.11, 0.1, 0.105], max_spread_ratio=0.35, next_step="")
