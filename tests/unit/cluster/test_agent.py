"""A host's agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.cluster.agent import _next_life

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("left", [None, "", "x"])
def test_a_lost_number_of_lives_is_followed_by_a_new_one(
    tmp_path: Path, left: str | None
) -> None:
    path = tmp_path / "life"
    before = [_next_life(path) for _ in range(3)]
    path.unlink()
    if left is not None:
        path.write_text(left)
    assert _next_life(path) not in before


def test_lives_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "life"
    path.write_text("6")
    assert [_next_life(path) for _ in range(2)] == [7, 8]
