import math

import pytest

from stretto.tune.cached_plans import CHECK_STEPS, CHECK_WARMUP_STEPS, PlanCheck

SLOW_START = [9.0] * CHECK_WARMUP_STEPS


def decided(steps_s: list[float], then_s: float = 1.0) -> tuple[int, float | None]:
    """Add steps until the check decides; return their number and the median."""
    check = PlanCheck(then_s)
    for number, step_s in enumerate(steps_s, start=1):
        now_s = check.add(step_s)
        if now_s is not None:
            return number, now_s
    return len(steps_s), None


def test_a_plan_that_holds_is_accepted_after_its_warm_up_and_a_few_steps():
    number, now_s = decided([*SLOW_START, *[1.05] * 20])
    assert (number, now_s) == (CHECK_WARMUP_STEPS + CHECK_STEPS, 1.05)
    assert not PlanCheck(1.0).is_slower(1.05)


def test_a_slow_moment_at_the_start_does_not_drop_a_plan():
    slow = CHECK_STEPS // 2 + 1
    steps_s = [*SLOW_START, *[2.0] * slow, *[1.0] * 2 * CHECK_STEPS]
    number, now_s = decided(steps_s)
    assert number == CHECK_WARMUP_STEPS + 2 * CHECK_STEPS
    assert now_s == 1.0
    assert not PlanCheck(1.0).is_slower(now_s)


@pytest.mark.parametrize(("step_s", "now_s"), [(2.0, 2.0), (math.inf, math.inf)])
def test_a_slower_plan_is_dropped_after_twice_as_many_steps(step_s, now_s):
    found = decided([*SLOW_START, *[step_s] * 20])
    assert found == (CHECK_WARMUP_STEPS + 2 * CHECK_STEPS, now_s)
    assert PlanCheck(1.0).is_slower(now_s)


def test_disturbed_steps_do_not_count():
    assert decided([*SLOW_START, math.inf, 1.0, math.inf, 1.0, 1.0])[1] == 1.0


def test_a_much_faster_step_is_noticed():
    assert PlanCheck(1.0).is_faster(0.8)
    assert not PlanCheck(1.0).is_faster(0.95)
