"""The examples of jobs, run to their end by commands alone, as the guide says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto import variable_names
from stretto.cluster import processes
from stretto.cluster.folders import Folders
from stretto.cluster.roles import holder_of
from support.clusters import ENDS, ENGINES, RAY, await_that

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.repeat,  # its parts are tested in `test_engines`
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "cluster"
JOBS = ("foreground-pair", "foreground-single", "background-small", "background-wide")
LIMIT_S = 240.0


class Commands:
    """``stretto cluster`` with a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *words: str) -> str:
        """Return what a command prints."""
        command = [sys.executable, "-m", "stretto", "cluster", *words]
        done = subprocess.run(
            [*command, "--folder", str(self._folder)],
            check=True,
            timeout=LIMIT_S,
            stdout=subprocess.PIPE,
        )
        return done.stdout.decode()

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return the jobs by name."""
        rows = json.loads(self("list", "--all", "--json"))["jobs"]
        return {row["name"]: row for row in rows}


def give_time(folders: Folders) -> None:
    """Give backgrounds an ordinary priority.

    They lower it themselves, and then get no processor time on a busy machine.
    """
    settings = folders.load_settings()
    for host in folders.hosts(settings):
        node = folders if settings.ray is None else folders.of_node(host)
        for attempt in node.attempts(host).glob("background-*"):
            for pid in processes.marked_processes(
                variable_names.CLUSTER_ATTEMPT, str(attempt)
            ):
                processes.raise_priority(pid)


@pytest.fixture
def commands(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Commands, Folders]]:
    """A cluster of four devices on each engine."""
    folder = tmp_path / "c"
    found = Commands(folder)
    found("start", "--local", "4", *(["--ray"] if request.param == RAY else []))
    try:
        yield found, Folders(folder)
    finally:
        found("down", "--timeout", "1")


@pytest.mark.parametrize("commands", ENGINES, indirect=True)
def test_the_examples_run_to_their_end_over_a_killed_coordinator(
    commands: tuple[Commands, Folders],
) -> None:
    run, folders = commands
    for name in JOBS:
        run("submit", str(EXAMPLES / f"{name}.json"))

    def pair_steps() -> bool:
        files = folders.files("foreground-pair-1")
        return (files / "digits.pt").exists()  # written after its first epoch

    await_that(pair_steps, lambda: str(run.jobs()), limit_s=LIMIT_S)
    pid = holder_of(folders.coordinator_lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    def all_ended() -> bool:
        give_time(folders)
        return all(row["state"] in ENDS for row in run.jobs().values())

    await_that(
        all_ended,
        lambda: str(run.jobs()),
        limit_s=LIMIT_S,
    )
    found = run.jobs()
    assert {n: (r["state"], r["attempt"]) for n, r in found.items()} == dict.fromkeys(
        JOBS, ("done", 1)
    )
