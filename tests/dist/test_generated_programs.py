"""Programs drawn at random, with DDP and while ``plan="auto"`` passes every phase."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto import variable_names
from stretto.testing.programs import ACTIONS, LOCAL_ACTIONS, compared, draw
from stretto.tune.forced import FORCED, FORCED_FORWARD

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


def compare(rank: int, size: int, numbers: list[int], schedule: str) -> list[str]:
    os.environ[variable_names.TUNE_SCHEDULE] = schedule
    if schedule == FORCED_FORWARD:
        os.environ[variable_names.POISON] = "1"
        os.environ[variable_names.OVERLAP] = "auto"
    found = [
        compared(
            number,
            nn.parallel.DistributedDataParallel,
            stretto.DistributedDataParallel,
            rank,
            size,
            timeout_s=120.0,
        )
        for number in numbers
    ]
    return [line for line in found if line is not None]


@settings(
    max_examples=3,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(numbers=st.lists(st.integers(0, 10**6), min_size=5, max_size=5, unique=True))
def test_generated_programs_are_ddp_s_bit_for_bit(
    ranks: Any, numbers: list[int]
) -> None:
    """``benchmarks/generated_programs.py`` runs hundreds, also on three ranks."""
    found = ranks(compare, 2, numbers, FORCED, timeout_s=120.0, group_s=60.0)
    assert found == [[], []], numbers


@settings(
    max_examples=2,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(numbers=st.lists(st.integers(0, 10**6), min_size=5, max_size=5, unique=True))
def test_generated_programs_that_overlap_with_forward_are_ddp_s_bit_for_bit(
    ranks: Any, numbers: list[int]
) -> None:
    found = ranks(compare, 2, numbers, FORCED_FORWARD, timeout_s=120.0, group_s=60.0)
    assert found == [[], []], numbers


def test_programs_of_a_few_hundred_numbers_have_every_action() -> None:
    drawn = {name for n in range(300) for step in draw(n).steps for name, _ in step}
    assert drawn == {*ACTIONS, *LOCAL_ACTIONS, "join", "freeze", "compile"}
    assert draw(7) == draw(7)


def phases(rank: int, size: int) -> list[tuple[str, str | None]]:
    os.environ[variable_names.TUNE_SCHEDULE] = FORCED
    program = draw(0)
    found: list[tuple[str, str | None]] = []
    import torch

    model = stretto.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    auto = model._auto
    for _ in range(len(program.steps)):
        model(torch.ones(2, 8)).sum().backward()
        plan = model.plan
        found.append((auto._phase.value, plan and plan.planner))
    return found


def test_the_forced_schedule_passes_every_phase_twice(ranks: Any) -> None:
    first, second = ranks(phases, 2)
    assert first == second
    search = [("profile", "profile")] * 2 + [("search", "forced")] * 4
    settled = [("confirm", "forced"), *[("watch", "forced")] * 8]
    # A step with DDP's own buckets came before.
    assert first[:22] == [*search, *settled, *search, settled[0]]
