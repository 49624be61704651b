"""A host's agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.cluster.agent import Agent, _next_life, _Part
from stretto.cluster.commands import RUN, StartPart
from stretto.cluster.folders import Folders, Settings
from support.clusters import job, part_spec_of

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


def test_an_attempt_does_not_start_beside_an_earlier_one(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    folders.save_settings(Settings(hosts={"host0": ("cpu:0",)}, policy="fifo"))
    folders.host("host0").mkdir(parents=True)
    agent = Agent(folders, "host0")
    agent._parts["j", 1] = _Part(tmp_path, part_spec_of(tmp_path, "true"), (0,))
    command = StartPart(
        host="host0",
        job="j",
        attempt=2,
        spec=job(tmp_path, "true"),
        purpose=RUN,
        devices=(0,),
        first_rank=0,
        ranks=1,
        hosts=("host0",),
        method="",
        batch=None,
        resume=False,
    )
    agent._start(command, None)
    assert list(agent._parts) == [("j", 1)]
    assert "j" not in agent._latest  # so the command is executed when it comes again
