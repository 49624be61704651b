"""Foreground and background in two processes, on an emulated device and with faults.

Sleep stands for device time and every bound is a ratio, so a busy machine changes
little.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stretto
from stretto.background.board import Board
from stretto.background.pacing import Policy
from stretto.background.windows import Window, usable_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]


def wakes_on_time():
    """Whether a sleep ends on time: on a quiet machine, or by priority."""
    code = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    done = subprocess.run([sys.executable, "-c", code], stderr=-3, check=False)
    return done.returncode == 0 or os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1)


times = pytest.mark.skipif(
    not wakes_on_time(), reason="a busy machine, and no permission for SCHED_FIFO"
)

PROGRAM = Path(__file__).parents[2] / "support" / "background_jobs.py"
DEVICE = "exclusive:test"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))


class Job:
    """A process of `background_jobs.py`."""

    def __init__(self, role, **arguments):
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.stderr.read())
        return json.loads(line)

    def rows(self):
        return [json.loads(line) for line in self.process.stdout]

    def finish(self):
        """End a background; return its totals."""
        self.process.stdin.close()
        return self.rows()[-1]

    def errors(self):
        return self.process.stderr.read()


@pytest.fixture
def jobs():
    made = []

    def start(role, **arguments):
        job = Job(role, **arguments)
        made.append(job)
        assert job.line() == {"ready": True}
        return job

    yield start
    for job in made:
        job.process.kill()
        job.process.wait()
        for pipe in (job.process.stdin, job.process.stdout, job.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()


def run_pair(jobs, segments, steps, first=2, **background):
    """Return median steps alone and beside a background, and the background's totals.

    Both are of one foreground process: the background joins in its middle.
    """
    foreground = jobs("foreground", device=DEVICE, segments=segments, steps=100000)
    alone = [foreground.line() for _ in range(max(4, steps // 2))]
    assert not any(r["read"] for r in alone)
    job = jobs("background", device=DEVICE, **background)
    while not foreground.line()["read"]:
        pass
    rows = [foreground.line() for _ in range(first + steps)]
    totals = job.finish()
    beside = rows[first:]
    return (
        statistics.median(r["seconds"] for r in alone),
        statistics.fmean(r["seconds"] for r in beside),
        totals,
        len(rows) + 1,
    )


@times
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_outstanding_tasks_cost_what_the_closed_form_says(jobs, depth):
    """(m - 1/2) * b per wait, for waits that end evenly within a task."""
    b, n = 0.016, 8
    segments = [(0.004, 2.5 * b + i * b / n) for i in range(n)]
    alone_s, beside_s, totals, _ = run_pair(
        jobs, segments, 12, task_s=b, policy="OUTSTANDING", depth=depth, adapts=False
    )
    task_s = totals["running_s"] / totals["tasks"]  # a sleep lasts longer than asked
    cost_s = n * (depth - 0.5) * task_s
    assert beside_s - alone_s == pytest.approx(cost_s, rel=0.2)


@times
def test_what_fits_costs_nothing_and_uses_the_windows(jobs):
    b, segments = 0.02, [(0.02, 0.11), (0.02, 0.07), (0.02, 0.015)]
    alone_s, beside_s, totals, steps = run_pair(
        jobs, segments, 16, first=8, task_s=b, policy="FITS", adapts=False, margin=0.1
    )
    windows = [Window(begin_s=0.0, length_s=w, kind="") for _, w in segments]
    assert beside_s / alone_s - 1.0 <= 0.02
    known = steps - 6  # learned from three complete steps, then one task is measured
    assert totals["tasks"] * b >= 0.8 * usable_s(windows, b) * known


@times
def test_a_task_longer_than_any_window_never_runs_beside_a_foreground(jobs):
    alone_s, beside_s, totals, _ = run_pair(
        jobs, [(0.02, 0.03)] * 2, 16, first=8, task_s=0.05, policy="FITS", adapts=False
    )
    assert totals["tasks"] <= 2  # the first, whose length is not known; and after it
    assert beside_s / alone_s <= 1.05


def test_the_second_background_of_a_device_is_refused_with_the_firsts_id(jobs):
    first = jobs("background", device=DEVICE, task_s=0.01)
    second = Job("background", device=DEVICE, task_s=0.01)
    _, errors = second.process.communicate(timeout=60)
    assert f"has a background already, process {first.process.pid}:" in errors
    assert jobs("background", device="exclusive:other", task_s=0.01)


def test_marks_end_when_the_background_was_killed_and_the_next_takes_over(jobs):
    foreground = jobs(
        "foreground", device=DEVICE, segments=[(0.005, 0.005)], steps=100000
    )
    first = jobs("background", device=DEVICE, task_s=0.001)
    while not foreground.line()["read"]:
        pass
    first.process.kill()
    first.process.wait()
    deadline = time.perf_counter() + 30
    while foreground.line()["read"]:
        assert time.perf_counter() < deadline
    jobs("background", device=DEVICE, task_s=0.001)
    while not foreground.line()["read"]:
        pass


def test_a_device_is_free_when_its_foreground_was_killed_within_a_step(jobs):
    foreground = jobs("foreground", device=DEVICE, segments=[(9.0, 0.1)], steps=9)
    job = jobs("background", device=DEVICE, task_s=0.005)
    time.sleep(1.0)
    board = Board(DEVICE)
    assert board.background()[1].tasks == 0  # the foreground holds the device
    foreground.process.kill()
    foreground.process.wait()
    deadline = time.perf_counter() + 30
    while board.has_foreground:
        assert time.perf_counter() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    board.close()
    assert job.finish()["tasks"] > 20


def test_a_foreground_that_gives_no_sign_keeps_the_device_closed(jobs):
    foreground = jobs(
        "foreground", device="cpu:9", segments=[(0.01, 0.01)] * 3, steps=100000
    )
    job = jobs(
        "background", device="cpu:9", task_s=0.002, policy="OUTSTANDING", adapts=False
    )
    board = Board("cpu:9")
    deadline = time.perf_counter() + 30
    while not board.background()[1].tasks:
        assert time.perf_counter() < deadline
        foreground.line()
    foreground.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    before = board.background()[1].tasks
    time.sleep(1.0)
    assert board.background()[1].tasks == before
    foreground.process.send_signal(signal.SIGCONT)
    foreground.process.kill()
    foreground.process.wait()
    time.sleep(1.5)
    board.close()
    assert job.finish()["tasks"] > before + 50


HANGING = """
import sys, time
import stretto
job = stretto.Foreground({device!r}, stop_after_s=2.0)
print("ready", flush=True)
for _ in range(1000):
    job.step()
    time.sleep(0.01)
    with job.waiting("network"):
        time.sleep(0.05)
    print("step", flush=True)
"""


def test_a_background_that_hangs_in_its_lease_is_reported_and_then_ended(jobs):
    foreground = subprocess.Popen(
        [sys.executable, "-c", HANGING.format(device=DEVICE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert foreground.stdout.readline() == "ready\n"
        job = jobs("background", device=DEVICE, task_s=0.005, hang_after=3)
        assert job.line() == {"hangs": True}
        job.process.wait(timeout=60)
        assert job.process.returncode == -15
        for _ in range(50):  # the foreground trains on
            assert foreground.stdout.readline() == "step\n"
    finally:
        foreground.kill()
        _, errors = foreground.communicate()
    assert errors.count("is in one lease for") == 1
    assert f"process {job.process.pid}: it ignores its lease" in errors


# A lease that begins before the foreground does, and a background without priority.
IN_A_LEASE = """
import os, signal, time
import stretto
job = stretto.Background({device!r}, isolates=False)
with job.lease():
    print("ready", flush=True)
    while True:
        {task}
"""


@contextlib.contextmanager
def in_a_lease(device, task):
    job = subprocess.Popen(
        [sys.executable, "-c", IN_A_LEASE.format(device=device, task=task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert job.stdout.readline() == "ready\n"
        yield job
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise MemoryError", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_a_background_that_runs_out_of_memory_in_a_lease_leaves_the_device(end, code):
    """By an error of its own, or killed by the system."""
    with (
        in_a_lease(DEVICE, f"time.sleep(0.5); {end}") as job,
        stretto.Foreground(DEVICE) as foreground,
    ):
        foreground.step()  # waits for the device
        assert job.wait(timeout=60) == code
        with stretto.Background(
            DEVICE, policy=Policy.OUTSTANDING, adapts=False
        ) as following:
            following.wait(timeout_s=0.0)  # it follows the marks from now on
            foreground.step()
            with foreground.waiting("network"):
                assert following.wait(timeout_s=60.0)
                following.end_task()
            foreground.step()


@pytest.mark.parametrize(
    ("device", "task"), [(DEVICE, "time.sleep(1)"), ("cpu:test", "pass")]
)
def test_a_background_that_hung_before_its_foreground_began_is_ended(device, task):
    with in_a_lease(device, task) as job:
        with stretto.Foreground(device, stop_after_s=1.5) as foreground:
            deadline = time.perf_counter() + 60
            while job.poll() is None:
                foreground.step()  # waits for the device
                assert time.perf_counter() < deadline
                time.sleep(0.01)
        assert job.returncode == -signal.SIGTERM


def test_a_background_that_only_sleeps_in_its_lease_keeps_no_processor(caplog):
    with in_a_lease("cpu:test", "time.sleep(1)") as job:
        with stretto.Foreground("cpu:test", stop_after_s=0.5) as foreground:
            while "is in one lease for" not in caplog.text:
                foreground.step()
                time.sleep(0.01)
            end_s = time.perf_counter() + 2.5  # two more looks
            while time.perf_counter() < end_s:
                foreground.step()
                time.sleep(0.01)
        assert job.poll() is None


@times
def test_a_pair_is_measured_by_a_background_that_began_alone(jobs):
    second = jobs("background", device=DEVICE, task_s=0.01, pair=True, margin=0.1)
    time.sleep(0.5)
    first = jobs("foreground", device=DEVICE, segments=[[0.02, 0.05]], steps=60)
    assert first.rows()[-1] == {"done": True}
    second.process.stdin.close()
    found = second.rows()
    assert len(found) == 2, second.errors()
    row = found[0]["pair"]
    assert row["policy"] == "fits"
    assert row["task_s"] == pytest.approx(0.01, rel=0.2)
    # Three or four tasks of 10 ms in each window of 50 ms, none in control steps.
    assert 0.4 <= row["usable_ratio"] <= 0.75
    assert 0.3 <= row["share_ratio"] <= row["usable_ratio"] * 1.1
    assert abs(row["loss_ratio"]) < 0.1
    assert row["pairs"] >= 4
