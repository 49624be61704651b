"""Ranks of a Horovod script are lost and replaced while the others keep their process.

What they have trained is compared with the same memberships in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.horovod_elastic import SCRIPT, Job, require_replay

if TYPE_CHECKING:
    from collections.abc import Callable


def run_job(
    folder: Path,
    elastic: str,
    *arguments: object,
    meanwhile: Callable[[int], None] | None = None,
) -> Job:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto", "run", "--elastic", elastic]
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            [*command, str(script), str(folder), *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=log,
            stderr=log,
        )
    try:
        if meanwhile is not None:
            meanwhile(started.pid)
        code = started.wait(540)
    finally:
        started.kill()
        started.wait()
    assert code == 0, (folder / "log").read_text()[-6000:]
    return Job(folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Rank 0 is lost, then another rank, each in backward; both are replaced."""
    return run_job(tmp_path_factory.mktemp("horovod"), "2:3", 2, 0)


pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def test_the_others_keep_their_process_and_replacements_join(job: Job) -> None:
    assert sorted(job.ends) == [1, 3, 4]
    assert [size for _, size in job.ends[1]["sizes"]] == [3, 2, 3, 2, 3]
    assert len({row["process"] for row in job.rows[1]}) == 1
    assert job.rows[1][-1]["resets"] == [2, 3, 2, 3]
    assert job.rows[3][-1]["resets"] == [3, 2, 3]


def test_the_survivor_that_has_trained_longest_is_rank_0(job: Job) -> None:
    last = {member: job.rows[member][-1] for member in job.ends}
    assert [last[m]["rank"] for m in (1, 3, 4)] == [0, 1, 2]
    assert {m: row["local"] for m, row in last.items()} == {
        1: [1, 3],
        3: [0, 3],
        4: [2, 3],
    }
    # Before it joins, a rank comes after those that train.
    assert job.rows[3][0]["first"] == [2, 3]


def test_no_committed_step_is_lost_and_all_end_equal(job: Job) -> None:
    require_replay(job)
    steps = [row["step"] for row in job.rows[1]]
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(steps))


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 4])

    def kill_some(keeper: int) -> None:
        for _ in range(chance.choice([1, 2, 3])):
            while len(trained := _trained(tmp_path, keeper)) < 2:
                if not _runs(keeper):
                    return
                time.sleep(0.05)
            time.sleep(chance.choice([0, 0.01, 0.03, 0.1, 0.3, 1, 3]))
            # One that has trained stays: without any, training begins again.
            lost = chance.sample(trained, chance.randint(1, len(trained) - 1))
            for process in lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            while not _children(keeper).isdisjoint(lost):
                time.sleep(0.01)

    job = run_job(tmp_path, f"1:{ranks}", 0, 150, meanwhile=kill_some)
    require_replay(job)


def _trained(folder: Path, keeper: int) -> list[int]:
    """Return the processes of the ranks that live and have trained."""
    rows = Job(folder).rows.values()
    found = [mine[-1]["process"] for mine in rows if mine and mine[-1]["step"] > 2]
    living = _children(keeper)
    return [process for process in found if process in living]


def _runs(process: int) -> bool:
    """Return whether a process has not ended."""
    stat = Path(f"/proc/{process}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"


def _children(keeper: int) -> set[int]:
    """Return a keeper's children that run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z" and int(parent) == keeper:
                found.add(int(path.parent.name))
    return found
