"""`stretto.optim.LinearDecay`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.optim import AdamSGD, LinearDecay


def rates(schedule, optimizer, steps):
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def sgd(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def test_rates_rise_then_fall_along_lines():
    optimizer = sgd(2.0)
    schedule = LinearDecay(optimizer, 10, 4)
    expected = [0.5, 1.0, 1.5, 2.0, 2.0, 5 / 3, 4 / 3, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    assert rates(schedule, optimizer, 12) == pytest.approx(expected)


def test_the_end_is_kept():
    optimizer = sgd()
    assert rates(LinearDecay(optimizer, 4, end=0.2), optimizer, 6) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_a_loaded_schedule_continues():
    optimizer, other = sgd(), sgd()
    schedule, loaded = LinearDecay(optimizer, 10, 3), LinearDecay(other, 20, 1)
    rates(schedule, optimizer, 5)
    loaded.load_state_dict(schedule.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert rates(schedule, optimizer, 7) == rates(loaded, other, 7)


def test_it_schedules_adam_sgd():
    optimizer = AdamSGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert rates(LinearDecay(optimizer, 2), optimizer, 3) == pytest.approx(
        [0.1, 0.05, 0.0]
    )


@pytest.mark.parametrize(
    ("steps", "options", "named"),
    [
        (4, {"warmup_steps": 4}, "warmup_steps"),
        (4, {"warmup_steps": -1}, "warmup_steps"),
        (0, {}, "total_steps"),
        (4, {"end": 1.5}, "end"),
    ],
)
def test_numbers_out_of_range_are_named(steps, options, named):
    with pytest.raises(ValueError, match=named):
        LinearDecay(sgd(), steps, **options)
