"""Which changes of the step time re-open a search."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import TYPE_CHECKING

from stretto.tune.drift_detector import (
    REST_STEPS,
    WINDOW_STEPS,
    DriftDetector,
    StepTimeChange,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def changes(
    watch: DriftDetector, steps_s: Iterable[float]
) -> list[tuple[int, StepTimeChange]]:
    found = []
    for number, step_s in enumerate(steps_s, start=1):
        median_s = watch.add(step_s)
        change = None if median_s is None else watch.judge(median_s)
        if change is not None:
            found.append((number, change))
    return found


def noisy(step_s: float, number: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [step_s * (1 + abs(rng.gauss(0, 0.05))) for _ in range(number)]


def test_noise_and_outliers_are_no_change() -> None:
    steps_s = noisy(0.1, 2000)
    for i in range(0, 2000, 13):
        steps_s[i] *= 10
    assert changes(DriftDetector(0.105), steps_s) == []


def test_a_lasting_change_is_reported_once_within_four_windows() -> None:
    watch = DriftDetector(0.1)
    found = changes(watch, [*noisy(0.1, 56), *noisy(0.2, 200)])
    assert len(found) == 1
    number, change = found[0]
    assert 56 < number <= 56 + 4 * WINDOW_STEPS
    assert 0.1 <= change.before_s < 0.12
    assert 0.2 <= change.now_s < 0.23


def test_faster_steps_are_a_change_too() -> None:
    assert len(changes(DriftDetector(0.2), [*noisy(0.2, 56), *noisy(0.1, 40)])) == 1


def test_a_change_that_passes_is_not_reported() -> None:
    steps_s = []
    for _ in range(20):
        steps_s += [*noisy(0.1, 2 * WINDOW_STEPS), *noisy(0.2, WINDOW_STEPS)]
    assert changes(DriftDetector(0.1), steps_s) == []


def test_after_a_search_without_a_gain_it_waits_longer_each_time() -> None:
    watch = DriftDetector(0.1)
    reported = []
    level_s = 0.1
    for number in range(1, 6000):
        median_s = watch.add(level_s)
        change = None if median_s is None else watch.judge(median_s)
        if change is not None:
            reported.append(number)
            watch.settled_again(change.now_s, better=False)
        elif number % 40 == 0 and watch._rest <= 0:
            level_s *= 1.5  # ever slower: never a level that is known
    pauses = [b - a for a, b in pairwise(reported)]
    assert len(reported) >= 4
    assert pauses[0] >= REST_STEPS
    assert pauses[2] >= 4 * REST_STEPS
    assert sorted(pauses) == pauses


def test_a_step_time_that_goes_back_and_forth_is_searched_for_once() -> None:
    watch = DriftDetector(0.1)
    reported = 0
    for number in range(20_000):
        step_s = 0.1 if number // 150 % 2 == 0 else 0.2
        median_s = watch.add(step_s)
        change = None if median_s is None else watch.judge(median_s)
        if change is not None:
            reported += 1
            watch.settled_again(change.now_s, better=False)
    assert reported == 1


def test_a_search_that_ended_on_a_busy_machine_is_no_reference() -> None:
    """Three steps of the search took 0.3; the machine is quiet again since."""
    assert changes(DriftDetector(0.3), noisy(0.1, 2000)) == []


def test_on_a_machine_whose_speed_varies_alarms_are_rare() -> None:
    """Busy loops of random length and pause, over a day's worth of steps in all."""
    alarms = 0
    for seed in range(100):
        rng = random.Random(seed)
        watch, slow, left = DriftDetector(0.1), False, 0
        for _ in range(1000):
            if left == 0:
                slow, left = not slow, 1 + int(rng.expovariate(1 / 12))
            left -= 1
            step_s = 0.1 * (1.7 if slow else 1.0) * (1 + abs(rng.gauss(0, 0.05)))
            median_s = watch.add(step_s)
            change = None if median_s is None else watch.judge(median_s)
            if change is not None:
                alarms += 1
                watch.settled_again(change.now_s, better=False)
    assert alarms <= 25  # in 100,000 steps


def test_a_true_change_is_found_on_a_noisy_machine_too() -> None:
    found = 0
    for seed in range(100):
        steps_s = [*noisy(0.1, 300, seed), *noisy(0.17, 100, seed + 1)]
        rng = random.Random(seed)
        for _ in range(40):
            steps_s[rng.randrange(len(steps_s))] *= 4
        alarms = changes(DriftDetector(0.1), steps_s)
        found += len(alarms) == 1 and alarms[0][0] > 300
    assert found >= 98


def test_the_first_window_gives_the_level_where_none_was_measured() -> None:
    watch = DriftDetector(None)
    assert changes(watch, noisy(0.1, 4 * WINDOW_STEPS)) == []
    assert watch.settled_s is not None
    assert 0.1 <= watch.settled_s < 0.11


def test_steps_that_do_not_count_do_not_decide() -> None:
    steps_s = [math.inf] * 200
    assert changes(DriftDetector(0.1), steps_s) == []
    mixed = [math.inf, 0.1] * 100
    assert changes(DriftDetector(0.1), mixed) == []
