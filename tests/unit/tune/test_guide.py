"""What a search believes of its model."""

from __future__ import annotations

import pytest

from stretto.tune.guide import DOUBT_RATIO, MOST_BOUND_DOUBT_RATIO, Guide


def test_one_wrong_prediction_is_not_forgotten_over_many_right_ones(workload, cluster):
    guide = Guide(workload, cluster)
    plans = [guide.plan_of(point) for point in guide.space.points[:7]]
    bound_s, predicted_s = guide.bound_s, guide.plan_s(plans[0])
    assert guide.floor_s(plans[0]) == pytest.approx(predicted_s / (1 + DOUBT_RATIO))

    assert guide.compare(plans[0], 2 * predicted_s) == pytest.approx(-0.5)
    for plan in plans[1:]:
        assert guide.compare(plan, guide.plan_s(plan)) == pytest.approx(0.0)

    assert guide.doubt_ratio == pytest.approx(0.5)
    assert guide.floor_s(plans[0]) == pytest.approx(predicted_s / 1.5)
    assert guide.bound_s == pytest.approx(bound_s / (1 + MOST_BOUND_DOUBT_RATIO))
