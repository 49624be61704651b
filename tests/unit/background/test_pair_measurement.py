"""What a pair of jobs measures, against closed forms."""

from __future__ import annotations

import pytest

from stretto.background.pacing import Gate, Policy
from stretto.background.pair_measurement import (
    MIN_ALONE,
    MIN_BLOCKS,
    PairMeasurement,
)
from stretto.background.windows import Window
from stretto.errors import SpecError
from stretto.sim.collocation import collocate

NAMES = {"foreground": "first", "background": "second", "device": "exclusive"}
WINDOWS = [Window(begin_s=0.0, length_s=0.035, kind="network")]
TASK_S, STEP_S = 0.01, 0.1


def alone(measurement, tasks=MIN_ALONE + 1):
    for i in range(tasks):
        measurement.add_task(0.02 * i, TASK_S, has_foreground=False)
    return 0.02 * tasks


def beside(measurement, begin_s, gate, blocks=MIN_BLOCKS, tasks=12, losses=(0.02,)):
    """Blocks of 8 steps with ``tasks`` tasks each."""
    limits = gate.policy, gate.depth
    measurement.begin_foreground()
    measurement.end_block(begin_s, limits, None, 0.0)
    for block in range(blocks):
        end_s = begin_s + (block + 1) * 8 * STEP_S
        for _ in range(tasks):
            measurement.add_task(end_s, TASK_S, has_foreground=True)
        measurement.end_block(end_s, limits, losses[block % len(losses)], STEP_S)


@pytest.mark.parametrize("policy", [Policy.FITS, Policy.OUTSTANDING])
def test_a_pair_is_both_jobs_rates_over_those_alone(policy):
    measurement, gate = PairMeasurement(), Gate(policy)
    beside(measurement, alone(measurement), gate, 5, losses=(0.0, 0.04, 0.02, 0.02))
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    assert pair.task_s == TASK_S
    assert pair.pairs == 5
    assert pair.loss_ratio == pytest.approx(0.02)
    assert pair.share_ratio == pytest.approx((12 / 0.8) / 50.0)
    assert pair.share_spread_ratio == pytest.approx(0.0, abs=1e-9)
    usable_s = 0.03 if policy is Policy.FITS else 0.035
    assert pair.usable_ratio == pytest.approx(usable_s / STEP_S)


def test_time_between_a_foreground_and_the_next_task_alone_does_not_count():
    measurement, gate = PairMeasurement(), Gate()
    end_s = alone(measurement, 6)
    beside(measurement, end_s, gate)
    for i in range(6):
        measurement.add_task(100.0 + 0.02 * i, TASK_S, has_foreground=False)
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    assert pair.share_ratio == pytest.approx((12 / 0.8) / 50.0)


def test_blocks_with_other_limits_do_not_count():
    measurement, gate = PairMeasurement(), Gate(depth=2)
    beside(measurement, alone(measurement), gate)
    gate.depth = 1
    with pytest.raises(SpecError, match="0 blocks of the foreground's steps"):
        measurement.pair(**NAMES, gate=gate, windows=WINDOWS)


@pytest.mark.parametrize(
    ("tasks", "blocks", "windows", "words"),
    [
        (MIN_ALONE, 9, WINDOWS, "9 tasks without a foreground"),
        (MIN_ALONE + 1, MIN_BLOCKS - 1, WINDOWS, "3 blocks of the foreground"),
        (MIN_ALONE + 1, 9, [], "no wait .* fits a task of 0.01 s: divide .* shorter"),
    ],
)
def test_what_is_missing_is_named(tasks, blocks, windows, words):
    measurement, gate = PairMeasurement(), Gate()
    beside(measurement, alone(measurement, tasks), gate, blocks)
    with pytest.raises(SpecError, match=words):
        measurement.pair(**NAMES, gate=gate, windows=windows)


class Step:
    """Stands for a predicted burst step of two ranks."""

    def __init__(self, *windows, iteration_s=STEP_S):
        self.windows, self.iteration_s = windows, iteration_s


@pytest.mark.parametrize("policy", [Policy.FITS, Policy.OUTSTANDING])
def test_a_pair_applied_to_its_own_step_gives_what_was_measured(policy):
    measurement, gate = PairMeasurement(), Gate(policy)
    beside(measurement, alone(measurement), gate)
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    found = collocate(Step(WINDOWS, WINDOWS), pair)
    assert found.background_by_rank == pytest.approx([pair.share_ratio] * 2)
    assert found.background == pytest.approx(pair.share_ratio)
    assert found.iteration_s == pytest.approx(STEP_S * 1.02)


def test_a_step_without_fitting_windows_has_no_background_and_no_loss():
    measurement, gate = PairMeasurement(), Gate()
    beside(measurement, alone(measurement), gate)
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    short = [Window(begin_s=0.0, length_s=0.009, kind="network")] * 5
    found = collocate(Step(short, ()), pair)
    assert found.background_by_rank == (0.0, 0.0)
    assert found.iteration_s == STEP_S


def test_a_background_at_its_full_rate_costs_what_was_measured():
    measurement, gate = PairMeasurement(), Gate()
    beside(measurement, alone(measurement), gate, tasks=30)
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    assert pair.use_ratio > 1.0  # the jobs overlapped elsewhere too
    long = [Window(begin_s=0.0, length_s=0.9 * STEP_S, kind="network")]
    found = collocate(Step(long), pair)
    assert found.background_by_rank == (1.0,)
    assert found.iteration_s == pytest.approx(STEP_S * 1.02)


def test_a_rank_without_layers_gives_the_background_its_rate_alone():
    measurement, gate = PairMeasurement(), Gate()
    beside(measurement, alone(measurement), gate)
    pair = measurement.pair(**NAMES, gate=gate, windows=WINDOWS)
    whole = [Window(begin_s=0.0, length_s=STEP_S, kind="network")]
    short = [Window(begin_s=0.0, length_s=0.009, kind="network")]
    found = collocate(Step(whole, short), pair)
    assert found.background_by_rank == (1.0, 0.0)
    assert found.iteration_s == STEP_S
