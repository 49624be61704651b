"""Measure a background in a process of its own beside a foreground, on one GPU.

The foreground computes products of matrices and then waits, as for a network. Beside
it, in blocks of some seconds and in turn, the background trains a small network

- ``none``: not at all;
- ``controller``: with leases and the controller (``max_loss`` 5 %);
- ``leases``: with leases, without the controller;
- ``free``: without leases, as a program that knows of no foreground.

A block's loss is its median step over that of the ``none`` blocks before and after it,
less one; a block's share is its rate of tasks over the rate alone. Each without MPS
and, where the daemon can be started, with it. Needs one CUDA device, otherwise it ends
with 3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch

import stretto
from _mps import mps_daemon
from _record import spread, store

MODES = ("controller", "leases", "free")
TASKS = {"short": 256, "long": 2048}
"""Samples of a background's task."""


def say(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


# The jobs, in processes of their own.


def foreground(*, size: int, count: int, wait_s: float) -> None:
    given = torch.randn(size, size, device="cuda")
    job = stretto.Foreground("cuda:0")
    while True:
        begin_s = time.perf_counter()
        job.step()
        for _ in range(count):
            torch.mm(given, given)
        torch.cuda.synchronize()
        computed_s = time.perf_counter() - begin_s
        with job.waiting("network"):
            time.sleep(wait_s)
        say(begin_s=begin_s, s=time.perf_counter() - begin_s, computed_s=computed_s)


def background() -> None:
    # Before CUDA is initialized, as `stretto run --background` does.
    first = stretto.Background("cuda:0")
    isolation = str(first.isolation)
    first.close()
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = {name: torch.randn(n, 1024, device="cuda") for name, n in TASKS.items()}

    def task(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    lengths = {}
    for name, x in inputs.items():
        for _ in range(20):
            task(x)
        begin_s = time.perf_counter()
        for _ in range(50):
            task(x)
        lengths[name] = (time.perf_counter() - begin_s) / 50
    say(isolation=isolation, lengths=lengths)
    for line in sys.stdin:
        how = json.loads(line)
        x, mode = inputs[how["task"]], how["mode"]
        job = None
        if mode != "free":
            job = stretto.Background("cuda:0", adapts=mode == "controller")
        begin_s, tasks, counted_s = time.perf_counter(), 0, 0.0
        while (now_s := time.perf_counter()) < begin_s + how["s"]:
            if not counted_s and now_s > begin_s + how["first_s"]:
                counted_s, tasks = now_s, 0
            if job is None:
                task(x)
            elif job.wait("task", timeout_s=0.05):
                task(x)
                job.end_task()
            else:
                continue
            tasks += 1
        end_s = time.perf_counter()
        row = {"from_s": counted_s, "to_s": end_s, "per_s": tasks / (end_s - counted_s)}
        if job is not None:
            row["statistics"] = str(job.statistics)
            job.close()
        say(**row)


class Job:
    """One of the processes, with its rows."""

    def __init__(self, role: str, environment: dict) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--job", role],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rows: list[dict] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self.changed:
                self.rows.append(json.loads(line))
                self.changed.notify_all()

    def row(self, number: int) -> dict:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.rows) > number, 60):
                sys.exit(f"no row {number}: the process ended or hangs")
            return self.rows[number]

    def asked(self, **how: object) -> dict:
        number = len(self.rows)
        self.process.stdin.write(json.dumps(how) + "\n")
        self.process.stdin.flush()
        return self.row(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measured(options: argparse.Namespace, environment: dict) -> dict:
    beside = Job("background", environment)
    try:
        start = beside.row(0)
        seconds = {"s": options.seconds, "first_s": options.first}
        alone = {
            name: beside.asked(task=name, mode="free", **seconds)["per_s"]
            for name in TASKS
        }
        job = Job("foreground", environment)
        try:
            job.row(50)
            found = blocks(options, job, beside, seconds, alone)
        finally:
            job.end()
    finally:
        beside.end()
    return {"isolation": start["isolation"], "task_s": start["lengths"], **found}


def blocks(
    options: argparse.Namespace, job: Job, beside: Job, seconds: dict, alone: dict
) -> dict:
    def step_s(from_s: float, to_s: float) -> float:
        return statistics.median(
            row["s"] for row in job.rows if from_s < row["begin_s"] < to_s
        )

    def without() -> float:
        begin_s = time.perf_counter()
        time.sleep(options.without)
        return step_s(begin_s, begin_s + options.without)

    bases, kept = [without()], []
    for number in range(options.blocks):
        modes = MODES if number % 2 else MODES[::-1]
        for name in TASKS:
            for mode in modes:
                row = beside.asked(task=name, mode=mode, **seconds)
                kept.append((name, mode, row, step_s(row["from_s"], row["to_s"])))
                bases.append(without())
    losses: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for i, (name, mode, row, with_s) in enumerate(kept):
        base_s = (bases[i] + bases[i + 1]) / 2
        losses.setdefault(f"{name}, {mode}", []).append(with_s / base_s - 1)
        shares.setdefault(f"{name}, {mode}", []).append(row["per_s"] / alone[name])
    last = {f"{n}, {m}": row.get("statistics") for n, m, row, _ in kept}
    return {
        "step_s": spread(bases),
        "computing_s": statistics.median(r["computed_s"] for r in job.rows[50:150]),
        "tasks_per_s_alone": alone,
        "rows": {
            name: {
                "loss": spread(losses[name]),
                "share": spread(shares[name]),
                "last": last[name],
            }
            for name in losses
        },
    }


def with_mps(options: argparse.Namespace) -> dict:
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        return {"failed": "no nvidia-cuda-mps-control"}
    with mps_daemon(program, check=True) as (environment, _):
        return measured(options, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--first", type=float, default=1.5)
    parser.add_argument("--without", type=float, default=1.0)
    parser.add_argument("--mps", choices=("no", "yes", "both"), default="both")
    options = parser.parse_args()
    if options.job == "foreground":
        foreground(size=4096, count=2, wait_s=0.01)
    if options.job == "background":
        return background()
    if not torch.cuda.is_available():
        print("gpu_background: no CUDA device here", file=sys.stderr)
        sys.exit(3)
    os.environ.setdefault("STRETTO_RUNTIME_DIR", tempfile.mkdtemp())
    found = {}
    if options.mps != "yes":
        found["without MPS"] = measured(options, {})
    if options.mps != "no":
        try:
            found["with MPS"] = with_mps(options)
        except (OSError, subprocess.SubprocessError, SystemExit) as error:
            found["with MPS"] = {"failed": str(error)}
    store(
        "gpu_background",
        {
            "what": "a background in a process of its own on one GPU",
            "device": torch.cuda.get_device_name(0),
            **found,
        },
    )
    return None


if __name__ == "__main__":
    main()
