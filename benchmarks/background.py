"""Measure background jobs: what they cost the foreground, and what they get.

Rows of the result, each with its target:

- ``cpu``: both jobs compute on one core, tasks of 1.1 and 4.7 ms. The foreground's loss
  and the background's rate over its own rate alone, over the foreground's idle share.
- ``priority``: processor time of a busy loop over that of a foreground's, after the
  priority is set, by launch form: a session of its own, the foreground's, a cgroup of
  equal weight.
- ``fits``, ``outstanding``: the emulated device, where sleep stands for device time.
- ``limit``: tasks that cost 46 % or more at one outstanding: the first step from which
  every eight steps are within the limit and 2 points.
- ``calls``: a step mark, an open lease, a step mark without background.

One foreground runs for a whole row; backgrounds join and leave, so that blocks alone
and beside alternate. About 5 minutes; ``--blocks 2 --steps 12`` is the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from contextlib import contextmanager
from typing import TYPE_CHECKING

import stretto
from _record import on_time, spread, store
from stretto.background import priority
from stretto.background.pacing import Policy
from stretto.background.windows import Window, usable_s

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU_CASES = {
    "4 x (3.4 ms + 10 ms wait), tasks 1.1 ms": ([(3.4e-3, 10e-3)] * 4, 1.1e-3),
    "10 x (2.9 + 2 ms), tasks 4.7 ms": ([(2.9e-3, 2e-3)] * 10, 4.7e-3),
}
LIMIT = 0.05


# the jobs, in processes of their own


def say(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def rounds_per_s() -> float:
    """Return how fast `compute` counts on an otherwise idle core."""
    best = 0.0
    for _ in range(20):
        begin_s = time.process_time()
        compute(20_000)
        best = max(best, 20_000 / (time.process_time() - begin_s))
    return best


def compute(rounds: float) -> None:
    for _ in range(int(rounds)):
        pass


def run_job(how: dict) -> None:
    if how["computes"]:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        rate = how["rate"]

        def work(seconds: float) -> None:
            compute(seconds * rate)
    else:
        on_time()
        work = time.sleep
    if how["role"] == "foreground":
        job = stretto.Foreground(how["device"])
        say(ready=True)
        while True:
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            job.step()
            for compute_s, wait_s in how["segments"]:
                work(compute_s)
                with job.waiting("network"):
                    time.sleep(wait_s)
            row = {"begin_s": begin_s, "s": time.perf_counter() - begin_s}
            say(**row, cpu_s=time.process_time() - cpu_s, read=job.is_read)
    policy = how["policy"] and Policy[how["policy"]]
    options = how.get("options", {})
    job = stretto.Background(how["device"], policy=policy, **options)
    say(ready=True, isolation=str(job.isolation))
    say(tasks=0, s=1.0, running_s=0.0)
    tasks, begin_s, ends_s = 0, time.perf_counter(), how.get("seconds", 1e9)
    while time.perf_counter() - begin_s < ends_s:
        if job.wait(timeout_s=0.1):
            work(how["task_s"])
            job.end_task()
            tasks += 1
            if tasks % 20 == 0 or how["task_s"] > 0.01:
                found = job.statistics
                say(tasks=found.tasks, s=found.elapsed_s, running_s=found.running_s)
    found = job.statistics
    say(tasks=found.tasks, s=found.elapsed_s, running_s=found.running_s, ended=True)


@contextmanager
def job_of(**how: object) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps(how)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        process.ready = json.loads(process.stdout.readline())
        yield process
    finally:
        process.kill()
        process.communicate()


def rows(process: subprocess.Popen, count: int) -> list[dict]:
    return [json.loads(process.stdout.readline()) for _ in range(count)]


def last_row(process: subprocess.Popen) -> dict:
    """Return what a killed background said last."""
    process.kill()
    lines = [line for line in process.stdout if line.endswith("}\n")]
    if not lines:
        sys.exit("the background got no time: other work fills the core")
    return json.loads(lines[-1])


# the rows


def steps_beside(
    foreground: subprocess.Popen, first: int, steps: int, **how: object
) -> tuple[list[float], dict]:
    """Return steps beside a new background, after the first ones, and its totals."""
    with job_of(role="background", **how) as beside:
        ready_s = time.perf_counter()  # rows of earlier steps are in the pipe
        while (row := rows(foreground, 1)[0])["begin_s"] < ready_s or not row["read"]:
            pass
        rows(foreground, first)
        found = [row["s"] for row in rows(foreground, steps)]
        totals = last_row(beside) | {"isolation": beside.ready["isolation"]}
    killed_s = time.perf_counter()  # until the ended reader is cleared
    while (row := rows(foreground, 1)[0])["begin_s"] < killed_s or row["read"]:
        pass
    return found, totals


def tasks_per_s_alone(task_s: float, rate: float, seconds: float = 2.0) -> float:
    """Return the rate of a background that computes on a device of its own."""
    how = {"device": "cpu:alone", "computes": True, "rate": rate, "task_s": task_s}
    with job_of(role="background", policy=None, seconds=seconds, **how) as job:
        totals = json.loads(job.stdout.readlines()[-1])
    return totals["tasks"] / totals["s"]


def cpu_row(options: argparse.Namespace, rate: float) -> dict:
    result = {}
    for name, (segments, task_s) in CPU_CASES.items():
        device = {"device": "cpu:bench", "computes": True, "rate": rate}
        losses, shares, isolation = [], [], ""
        with job_of(role="foreground", segments=segments, **device) as foreground:
            for _ in range(options.blocks):
                steps = rows(foreground, options.steps)
                alone = [r["s"] for r in steps]
                idle = 1 - sum(r["cpu_s"] for r in steps) / sum(alone)
                beside, totals = steps_beside(
                    foreground,
                    4,
                    2 * options.steps,
                    task_s=task_s,
                    policy=None,
                    **device,
                )
                losses.append(statistics.median(beside) / statistics.median(alone) - 1)
                isolation = totals["isolation"]
                by_itself = tasks_per_s_alone(task_s, rate)
                shares.append(totals["tasks"] / totals["s"] / by_itself / idle)
        result[name] = {
            "loss": spread(losses) | {"worst": max(losses)},
            "share_over_idle": spread(shares),
            "isolation": isolation,
        }
    return result


def priority_row() -> dict:
    forms = {}
    for method in priority.METHODS:
        found = priority.probe([method])
        forms[f"own session, {method}"] = {"ratio": found.ratio, "how": found.detail}
    for name, where in LAUNCH_FORMS.items():
        found = launched(**where)
        forms[f"{name}, chosen"] = {"ratio": found[2], "how": found[1]}
    return forms


LOWER = """
import json, sys
from stretto.background import priority
found = priority.lower(foreground_pid=int(sys.argv[1]))
print(json.dumps([found.method, found.detail, found.ratio]))
"""

LAUNCH_FORMS = {
    "own session": {"session": True, "cgroup": False},
    "the foreground's session": {"session": False, "cgroup": False},
    "a cgroup of equal weight, as a container's": {"session": True, "cgroup": True},
}


def launched(*, session: bool, cgroup: bool) -> list:
    """Return method, detail and ratio of a background beside this process."""
    own = priority.own_cgroup() / f"stretto-bench-{os.getpid()}" if cgroup else None

    def enter() -> None:
        if own is not None:
            (own / "cgroup.procs").write_text(str(os.getpid()))

    if own is not None:
        try:
            own.mkdir()
        except OSError as exc:
            return ["", f"no permission for cgroups: {exc}", None]
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOWER, str(os.getpid())],
            start_new_session=session,
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
    finally:
        if own is not None:
            own.rmdir()
    return json.loads(done.stdout)


def fits_row(options: argparse.Namespace) -> dict:
    b, segments = 0.005, [(0.010, 0.032), (0.006, 0.018), (0.008, 0.004)]
    windows = [Window(begin_s=0.0, length_s=w, kind="") for _, w in segments]
    device = {"device": "exclusive:bench", "computes": False}
    losses, shares = [], []
    with job_of(role="foreground", segments=segments, **device) as foreground:
        for _ in range(options.blocks):
            alone = [r["s"] for r in rows(foreground, options.steps)]
            beside, totals = steps_beside(
                foreground,
                10,
                4 * options.steps,
                task_s=b,
                policy="FITS",
                options={"adapts": False, "margin": 0.1},
                **device,
            )
            losses.append(statistics.fmean(beside) / statistics.fmean(alone) - 1)
            count = len(beside) + 10
            usable = usable_s(windows, b) * count
            shares.append(totals["tasks"] * b / usable)
    return {"loss": spread(losses), "share_of_usable": spread(shares)}


def outstanding_row(options: argparse.Namespace) -> dict:
    b, n, result = 0.008, 8, {}
    segments = [(0.004, 2.5 * b + i * b / n) for i in range(n)]
    device = {"device": "exclusive:bench", "computes": False}
    with job_of(role="foreground", segments=segments, **device) as foreground:
        for depth in (1, 2, 4):
            over = []
            for _ in range(options.blocks):
                alone = [r["s"] for r in rows(foreground, options.steps)]
                beside, totals = steps_beside(
                    foreground,
                    2,
                    options.steps,
                    task_s=b,
                    policy="OUTSTANDING",
                    options={"adapts": False, "depth": depth},
                    **device,
                )
                task_s = totals["running_s"] / totals["tasks"]
                cost_s = statistics.fmean(beside) - statistics.fmean(alone)
                over.append(cost_s / (n * (depth - 0.5) * task_s))
            result[f"depth {depth}"] = spread(over)
    return result


def limit_row(options: argparse.Namespace) -> dict:
    segments, b = [(0.0116, 0.008)] * 10, 0.0188
    device = {"device": "exclusive:bench", "computes": False}
    needed, before, after = [], [], []
    with job_of(role="foreground", segments=segments, **device) as foreground:
        for _ in range(options.blocks):
            alone_s = statistics.median(r["s"] for r in rows(foreground, 10))
            free, _ = steps_beside(
                foreground,
                1,
                8,
                task_s=b,
                policy="OUTSTANDING",
                options={"adapts": False},
                **device,
            )
            before.append(statistics.fmean(free) / alone_s - 1)
            beside, _ = steps_beside(
                foreground,
                0,
                60,
                task_s=b,
                policy="OUTSTANDING",
                options={"max_loss": LIMIT},
                **device,
            )
            loss = [s / alone_s - 1 for s in beside]
            over = [
                i
                for i in range(len(loss) - 8)
                if statistics.fmean(loss[i : i + 8]) > LIMIT + 0.02
            ]
            needed.append(float(max(over, default=-1) + 1))
            after.append(statistics.fmean(loss[30:]))
    return {
        "loss_at_first": spread(before),
        "steps": spread(needed),
        "loss_after_30": spread(after),
    }


def calls_row() -> dict:
    def us(call: object, number: int = 3000) -> float:
        return min(timeit.repeat(call, number=number, repeat=9)) / number * 1e6

    with stretto.Foreground("cpu:calls") as foreground:
        result = {"step_mark_without_background_us": us(foreground.step)}
        with stretto.Background(
            "cpu:calls", policy=Policy.OUTSTANDING, adapts=False, isolates=False
        ) as job:
            result["step_mark_us"] = us(foreground.step)
            job.wait(timeout_s=0.0)
            best = []
            for _ in range(200):
                foreground.step()
                job.wait()
                job.end_task()
                begin_s = time.perf_counter()
                for _ in range(20):
                    job.wait()
                best.append((time.perf_counter() - begin_s) / 20 * 1e6)
            result["lease_open_us"] = min(best)
            result["lease_open_median_us"] = statistics.median(best)
    with stretto.Background("cpu:calls", isolates=False) as job:
        result["lease_without_foreground_us"] = us(job.wait)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rows", default="calls,priority,fits,outstanding,limit,cpu")
    parser.add_argument("--name", default="background", help="of the result")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(json.loads(options.job))
        return
    result: dict = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STRETTO_RUNTIME_DIR"] = folder
        found = {
            "calls": calls_row,
            "priority": priority_row,
            "fits": lambda: fits_row(options),
            "outstanding": lambda: outstanding_row(options),
            "limit": lambda: limit_row(options),
            "cpu": lambda: cpu_row(options, rounds_per_s()),
        }
        for name in options.rows.split(","):
            result[name] = found[name]()
            sys.stderr.write(f"{name}: {json.dumps(result[name])}\n")
    targets = {
        "calls": "step mark 1 us, open lease 10 us, nothing without background",
        "priority": "at most 0.05",
        "fits": "loss at most 2 %; at least 0.8 of the usable window time",
        "outstanding": "within 20 % of n (m - 1/2) b, that is 0.8 to 1.2",
        "limit": f"at most 30 steps to {LIMIT:.0%} and 2 points",
        "cpu": "median loss at most 2 %, worst 5 %; at least 0.75 of the idle share",
    }
    store(options.name, {"targets": targets, **result})


if __name__ == "__main__":
    main()
