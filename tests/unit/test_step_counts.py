"""Ranks count their steps in a file that others read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.background import step_reports
from stretto.errors import SpecError
from stretto.step_counts import StepCounter, StepCounts, create

if TYPE_CHECKING:
    from pathlib import Path


def test_a_rank_that_has_ended_no_step_has_count_0(tmp_path: Path) -> None:
    create(tmp_path / "steps", 2)
    assert StepCounts(tmp_path / "steps").read(1).steps == 0


def test_steps_are_counted_by_rank_with_their_times(tmp_path: Path) -> None:
    create(tmp_path / "steps", 3)
    counter = StepCounter(tmp_path / "steps", 1)
    for _ in range(5):
        counter.add()
    counts = StepCounts(tmp_path / "steps")
    found = counts.read(1)
    assert (counts.read(0).steps, found.steps, counts.read(2).steps) == (0, 5, 0)
    assert 0.0 < found.first_s <= found.last_s


def test_the_file_is_this_users_alone(tmp_path: Path) -> None:
    create(tmp_path / "steps", 1)
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"x" * 200, b"strsteps"[::-1] + b"\xff" * 100])
def test_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "steps").write_bytes(data)
    with pytest.raises(SpecError, match="not a file of step counts"):
        StepCounts(tmp_path / "steps")


def test_a_rank_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    create(tmp_path / "steps", 2)
    with pytest.raises(SpecError, match="has 2 ranks, not rank 2"):
        StepCounter(tmp_path / "steps", 2)


class Optimizer:
    """Stands for one of torch."""


def test_of_two_optimizers_in_turn_one_is_counted() -> None:
    counted: list[int] = []
    hook = step_reports._Hook(lambda: counted.append(1))
    first, second = Optimizer(), Optimizer()
    for _ in range(20):
        for optimizer in (first, second):
            hook.begin(optimizer)
            hook(optimizer)
    assert len(counted) == 20


def test_a_step_within_a_step_of_the_same_optimizer_is_no_second_one() -> None:
    counted: list[int] = []
    hook, optimizer = step_reports._Hook(lambda: counted.append(1)), Optimizer()
    hook.begin(optimizer)  # it raises
    for _ in range(3):
        hook.begin(optimizer)
        hook.begin(optimizer)
        hook(optimizer)
        hook(optimizer)
    assert len(counted) == 3


def test_another_optimizer_is_counted_once_the_first_has_gone() -> None:
    counted: list[int] = []
    hook = step_reports._Hook(lambda: counted.append(1))
    first = Optimizer()
    hook.begin(first)
    hook(first)
    del first
    second = Optimizer()
    for _ in range(5):
        hook.begin(second)
        hook(second)
    assert len(counted) == 6


def test_a_missing_file_is_a_warning_not_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRETTO_STEP_COUNTS", "/nowhere/steps")
    monkeypatch.setattr(step_reports, "_is_installed", False)
    step_reports.report_steps()
    assert "steps are not reported to /nowhere/steps" in caplog.text
