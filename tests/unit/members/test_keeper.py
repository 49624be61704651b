"""A keeper with ranks that train nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stretto.members.view import Member, View
from stretto.members.wire import view_message, view_of

if TYPE_CHECKING:
    from pathlib import Path

KEEPER = """
import sys
from stretto.members import keeper
keeper.STOPPED_S = 0.2
job = keeper.ElasticJob(
    command=(sys.executable, sys.argv[1]), ranks=3, min_ranks=int(sys.argv[2]),
    max_ranks=3, replaces=False,
)
sys.exit(keeper.RankKeeper(job).run())
"""

RANK = """
import os, signal, sys
from stretto.members.client import MemberClient
client = MemberClient.of_environment()
assert "torch" not in sys.modules
client.start(f"h:{client.member}", on_view=lambda _: None, on_end=lambda _: None)
view = client.next_view(0, timeout_s=60)
if client.member == 0:
    os.kill(os.getpid(), signal.SIGNAL)
if 0 in view.ids:
    view = client.next_view(view.generation, timeout_s=60)
print("view", view.generation, view.ids, view.members[0].address, flush=True)
client.left()
"""


def run_keeper(
    folder: Path, signal: str, least: int
) -> subprocess.CompletedProcess[str]:
    driver, rank = folder / "keeper.py", folder / "rank.py"
    driver.write_text(KEEPER)
    rank.write_text(RANK.replace("SIGNAL", signal))
    return subprocess.run(
        [sys.executable, str(driver), str(rank), str(least)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_ranks_get_a_view_without_one_that_was_killed_or_stopped(
    tmp_path: Path, signal: str
) -> None:
    ended = run_keeper(tmp_path, signal, least=2)
    assert ended.stdout.splitlines() == ["view 2 (1, 2) h:1"] * 2
    assert ended.returncode == 0


def test_a_job_with_too_few_ranks_ends_with_the_status_of_the_lost_one(
    tmp_path: Path,
) -> None:
    ended = run_keeper(tmp_path, "SIGKILL", least=3)
    assert ended.returncode == 128 + 9
    assert "2 ranks are left, of at least 3" in ended.stderr


def test_a_view_survives_its_line() -> None:
    view = View(generation=3, members=(Member(id=4, keeper=1, address="a:1"),))
    assert view_of(view_message(view)) == view
    assert view_of({"end": 3}) is None
