"""Control steps and the loss that they show, against exact counts and known shifts."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.background.paired_steps import (
    PairedSteps,
    StepRecord,
    is_control_step,
)

PERIODS = (4, 8, 16, 32, 64)


@given(st.sampled_from(PERIODS), st.integers(0, 10**12))
def test_each_group_of_a_period_has_one_control_step(period, group):
    numbers = range(group * period, (group + 1) * period)
    assert sum(is_control_step(number, period) for number in numbers) == 1


@given(st.integers(0, 10**12))
def test_the_control_steps_of_a_period_are_among_those_of_shorter_ones(number):
    found = [is_control_step(number, period) for period in PERIODS]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("pattern", [2, 3, 4, 5, 16, 64])
def test_control_steps_are_of_all_kinds_of_a_pattern(period, pattern):
    count = 200 * pattern * period
    kinds = Counter(n % pattern for n in range(count) if is_control_step(n, period))
    assert set(kinds) == set(range(pattern))
    usual = count / period / pattern
    assert all(abs(found - usual) < 0.5 * usual for found in kinds.values())


def compared(duration_of, *, steps=800, period=16, loss=0.0, seed=0):
    rng, paired, losses = random.Random(seed), PairedSteps(), []
    for number in range(steps):
        length_s = duration_of(number, rng)
        if is_control_step(number, period):
            record = StepRecord(duration_s=length_s, had_task=False)
            if paired.add_control(number, record) and paired.blocks >= 8:
                losses.append(paired.compare(8).loss)
        else:
            record = StepRecord(duration_s=(1.0 + loss) * length_s, had_task=True)
            paired.add_step(number, record)
    return losses


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("change", [0.99, 1.0, 1.01])
def test_the_loss_is_exact_whatever_the_steps_drift(loss, change):
    found = compared(lambda number, rng: change**number, loss=loss)
    assert statistics.fmean(found) == pytest.approx(loss, abs=0.02)


@pytest.mark.parametrize("pattern", range(2, 17))
def test_the_loss_is_exact_for_every_pattern_once_it_is_known(pattern):
    lengths = [random.Random(pattern).uniform(1.0, 4.0) for _ in range(pattern)]
    found = compared(lambda number, rng: lengths[number % pattern], loss=0.1)
    assert found[-20:] == pytest.approx([0.1] * 20, abs=1e-9)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.uniform(0.5, 1.5),
        lambda rng: rng.lognormvariate(0.0, 0.4),
        lambda rng: rng.expovariate(1.0),
        lambda rng: 8.0 if rng.random() < 0.1 else 1.0,
    ],
)
def test_the_loss_of_any_distribution_is_right_on_average(draw):
    found = list(
        itertools.chain.from_iterable(
            compared(lambda number, rng: draw(rng), loss=0.2, seed=seed)
            for seed in range(20)
        )
    )
    assert statistics.median(found) == pytest.approx(0.2, abs=0.06)


def test_a_block_continues_after_a_control_step_that_follows_another():
    paired = PairedSteps()
    for number, had in enumerate([False, False, True, False, True, False]):
        record = StepRecord(duration_s=1.0 + 0.5 * had, had_task=had)
        if had:
            paired.add_step(number, record)
        else:
            ended = paired.add_control(number, record)
    assert ended
    assert paired.blocks == 1
    assert paired.compare(1).loss == pytest.approx(0.5)


def test_errors_widen_what_a_single_block_says():
    paired = PairedSteps()
    rng = random.Random(0)
    for number in range(9):
        had = number not in (0, 8)
        record = StepRecord(duration_s=rng.gauss(1.0, 0.1), had_task=had)
        (paired.add_step if had else paired.add_control)(number, record)
    found = paired.compare(1, 2.0)
    assert found.low < found.loss < found.high


def test_a_change_of_the_foreground_within_a_block_is_no_certain_loss():
    paired = PairedSteps()
    for number in range(17):
        had = number not in (0, 16)
        record = StepRecord(duration_s=1.0 if number < 4 else 3.0, had_task=had)
        (paired.add_step if had else paired.add_control)(number, record)
    assert paired.compare(1, 2.0).low < 0.0
