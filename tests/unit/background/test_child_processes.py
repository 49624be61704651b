"""Processes that a background has started: their count, a warning, their priority."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto.background import lease
from stretto.background.child_processes import ChildProcesses, child_processes
from stretto.background.priority import CGROUP, SESSION, Isolation
from support.autogroups import has_autogroups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

AUTOGROUP = Path("/proc/self/autogroup")

COMPUTE = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; read end"
LEAST_S = 0.02


@pytest.fixture
def started():
    made = []

    def start(*command, **options):
        made.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
            )
        )
        assert made[-1].stdout.readline() == b"done\n"
        return made[-1]

    yield start
    for process in made:
        process.communicate()


@pytest.mark.parametrize("child", [COMPUTE, f"sh -c '{COMPUTE}'; true"])
def test_running_children_and_their_children_are_counted(started, child):
    before = child_processes()
    process = started("/bin/sh", "-c", child)
    now = child_processes()
    assert process.pid in now.pids
    assert process.pid not in before.pids
    assert now.used_s - before.used_s > LEAST_S


def test_children_that_have_ended_stay_counted(started):
    before = child_processes()
    process = started("/bin/sh", "-c", COMPUTE)
    process.communicate()
    now = child_processes()
    assert process.pid not in now.pids
    assert now.used_s - before.used_s > LEAST_S


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A background beside a foreground; its children compute 0.6 s between looks."""
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(lease, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(lease, "_CHILDREN_EVERY_S", 0.0)
    looks = []

    def look():
        looks.append(None)
        return ChildProcesses((), 0.6 * len(looks))

    monkeypatch.setattr(lease, "child_processes", look)
    with (
        stretto.Foreground("cpu:8") as foreground,
        stretto.Background("cpu:8", isolates=False) as background,
    ):
        yield foreground, background


def warnings_of(caplog):
    return [r for r in caplog.records if "that it has started" in r.getMessage()]


def test_children_that_compute_beside_a_foreground_are_named_once(pair, caplog):
    _, background = pair
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            background.wait(timeout_s=0.0)
    assert len(warnings_of(caplog)) == 1
    assert background.statistics.children_s == pytest.approx(9 * 0.6)


def test_children_behind_a_working_priority_are_only_counted(pair, caplog):
    _, background = pair
    background._status.is_preempted = True
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            background.wait(timeout_s=0.0)
    assert not warnings_of(caplog)
    assert background.statistics.children_s > 1.0


def test_children_are_not_counted_without_a_foreground(pair):
    foreground, background = pair
    background.wait(timeout_s=0.0)
    foreground.close()
    for _ in range(9):
        assert background.wait(timeout_s=0.0)
    assert background.statistics.children_s == 0.0


@pytest.mark.skipif(not has_autogroups(), reason="no autogroups")
@pytest.mark.parametrize(("method", "nice"), [(SESSION, "19"), (CGROUP, "0")])
def test_a_childs_own_session_is_lowered_where_sessions_are_groups(
    started, method, nice
):
    child = started("/bin/sh", "-c", "echo done; read end", start_new_session=True)
    before = AUTOGROUP.read_text()  # empty for a session that is older than autogroups
    Isolation(method=method, detail="").extend_to([child.pid, os.getpid()])
    found = Path(f"/proc/{child.pid}/autogroup").read_text()
    assert found.split()[-1] == nice
    assert AUTOGROUP.read_text() == before
