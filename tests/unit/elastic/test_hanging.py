"""When a rank's steps count as hanging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto import foreground_marks, variable_names
from stretto.elastic.hanging import StepProgress
from stretto.errors import SpecError
from stretto.members.progress import Doing, ProgressReader, create

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressReader]:
    create(tmp_path / "page")
    monkeypatch.setenv(variable_names.PROGRESS, str(tmp_path / "page"))
    before = foreground_marks.current()
    yield ProgressReader(tmp_path / "page")
    foreground_marks.set_current(before)


def trained(steps: int) -> StepProgress:
    made = StepProgress()
    for _ in range(steps):
        made.begin_step(0)
        made.end_step()
    return made


def test_the_first_steps_may_take_their_time(page: ProgressReader) -> None:
    made = trained(2)
    made.begin_step(0)
    assert page.read().doing is Doing.ANYTHING


def test_later_steps_and_their_input_have_a_limit(page: ProgressReader) -> None:
    made = trained(4)
    assert page.read().doing is Doing.COMPUTING
    assert page.read().limit_s == 30.0
    made.rest()
    assert page.read().doing is Doing.ANYTHING


def test_a_wait_for_others_is_not_a_computation(page: ProgressReader) -> None:
    trained(4)
    marks = foreground_marks.current()
    marks.begin_wait("all-reduce")
    assert page.read().doing is Doing.WAITING
    marks.end_wait()
    assert page.read().doing is Doing.COMPUTING


def test_the_limit_may_be_switched_off(
    page: ProgressReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_names.HANG_S, "0")
    trained(4)
    assert page.read().doing is Doing.ANYTHING
    monkeypatch.setenv(variable_names.HANG_S, "long")
    with pytest.raises(SpecError, match=variable_names.HANG_S):
        StepProgress()
