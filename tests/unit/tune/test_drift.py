"""Which changes of the step time re-open a search."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import TYPE_CHECKING

from stretto.tune.board import StepClock
from stretto.tune.drift import REST_STEPS, WINDOW_STEPS, Change, Watch

if TYPE_CHECKING:
    from collections.abc import Iterable


def changes(watch: Watch, steps_s: Iterable[float]) -> list[tuple[int, Change]]:
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
    assert changes(Watch(0.105), steps_s) == []


def test_a_lasting_change_is_told_once_within_two_windows() -> None:
    watch = Watch(0.1)
    found = changes(watch, [*noisy(0.1, 40), *noisy(0.2, 200)])
    assert len(found) == 1
    number, change = found[0]
    assert 40 < number <= 40 + 3 * WINDOW_STEPS
    assert change.before_s == 0.1
    assert 0.2 <= change.now_s < 0.23


def test_faster_steps_are_a_change_too() -> None:
    assert len(changes(Watch(0.2), noisy(0.1, 40))) == 1


def test_a_change_that_passes_is_none() -> None:
    steps_s = []
    for _ in range(20):
        steps_s += [*noisy(0.1, 2 * WINDOW_STEPS), *noisy(0.2, WINDOW_STEPS)]
    assert changes(Watch(0.1), steps_s) == []


def test_after_a_search_in_vain_it_waits_and_longer_each_time() -> None:
    watch = Watch(0.1)
    told = []
    level_s = 0.1
    for number in range(1, 4000):
        median_s = watch.add(level_s)
        change = None if median_s is None else watch.judge(median_s)
        if change is None:
            if number % 40 == 0:
                level_s = 0.3 - level_s  # wanders between two levels
            continue
        told.append(number)
        watch.settled_again(change.now_s, better=False)
    pauses = [b - a for a, b in pairwise(told)]
    assert len(told) >= 4
    assert pauses[0] >= REST_STEPS
    assert pauses[2] >= 4 * REST_STEPS
    assert sorted(pauses) == pauses


def test_the_first_window_gives_the_level_where_none_was_measured() -> None:
    watch = Watch(None)
    assert changes(watch, noisy(0.1, 4 * WINDOW_STEPS)) == []
    assert watch.settled_s is not None
    assert 0.1 <= watch.settled_s < 0.11


def test_steps_that_do_not_count_do_not_decide() -> None:
    steps_s = [math.inf] * 200
    assert changes(Watch(0.1), steps_s) == []
    mixed = [math.inf, 0.1] * 100
    assert changes(Watch(0.1), mixed) == []


def test_a_step_lasts_from_its_first_micro_step_to_the_next_ones_start() -> None:
    clock = StepClock()
    assert clock.ended_s(0.0) is None
    clock.begin(0.0, reduces=False, new_step=True)
    assert clock.ended_s(1.0) is None
    clock.begin(1.0, reduces=True, new_step=False)
    assert clock.ended_s(3.0) == 3.0
    clock.begin(3.5, reduces=True, new_step=True)
    clock.disturb()
    assert clock.ended_s(5.0) == math.inf
    clock.begin(5.0, reduces=True, new_step=True)
    assert clock.ended_s(6.0) == 1.0
