"""Run one small trace on the local engine and in the simulator: equal order and times?

Jobs sleep, ``--faster`` times (100) as fast as the trace says. A background that is
stopped keeps what it has done. Each job's completion time, from submission to end, is
compared with the simulator's; so is the order in which jobs end. What a start costs on
this machine is measured first, with jobs that sleep for half a second, and given to the
simulator. About a minute.

    .venv/bin/python benchmarks/cluster_same_trace.py [--policy fifo] [--jobs 20]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import spread, store
from stretto.cluster import engine_local
from stretto.cluster.engine_sim import SimulatedJob, simulate
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.policies import registry
from stretto.schema import codec
from stretto.schema.job import BACKGROUND, FOREGROUND, GpuRange, Job

DEVICES, MEAN_S, TARGET_RATIO = 4, 300.0, 0.05

SLEEPER = """
import os, signal, sys, time
begin, slept = time.monotonic(), 0.0
kept = os.environ["STRETTO_CLUSTER_FILES"] + "/slept"
if os.path.exists(kept):
    with open(kept) as file:
        slept = float(file.read())
def stop(*_):
    with open(kept, "w") as file:
        file.write(str(slept + time.monotonic() - begin))
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
time.sleep(max(0.0, float(sys.argv[1]) - slept))
os._exit(0)
"""
CALIBRATIONS = 9


def trace_of(number: int, seed: int) -> list[SimulatedJob]:
    """Return jobs of one to four devices; ends are some seconds apart."""
    draw, at_s, found = random.Random(seed), 0.0, []
    for index in range(number):
        role = BACKGROUND if draw.random() < 0.3 else FOREGROUND
        gpus = 1 if role == BACKGROUND else draw.choice([1, 1, 2, 4])
        duration_s = draw.uniform(0.5, 1.5) * MEAN_S
        spec = Job(
            name=f"job{index}",
            role=role,
            command=(sys.executable, "-S", "sleeper.py"),
            launch="direct",
            directory="/",
            gpus=GpuRange(minimum=gpus, maximum=gpus),
            priority=draw.choice([0, 0, 1]),
        )
        found.append(SimulatedJob(spec=spec, submit_s=at_s, work_s=duration_s * gpus))
        at_s += draw.uniform(0.1, 0.6) * MEAN_S
    return found


def start_s(faster: float) -> float:
    """Return the trace's seconds that a start costs on the local engine."""
    spec = dataclasses.replace(
        trace_of(1, 0)[0].spec, gpus=GpuRange(minimum=1, maximum=1)
    )
    jobs = [
        SimulatedJob(
            spec=dataclasses.replace(spec, name=f"job{index}"),
            submit_s=index * faster,
            work_s=0.5 * faster,
        )
        for index in range(CALIBRATIONS)
    ]
    found = on_local_engine(jobs, "fifo", faster)
    return statistics.median(each[0] for each in found.values()) - 0.5 * faster


def on_local_engine(
    jobs: list[SimulatedJob], policy: str, faster: float
) -> dict[str, tuple[float, float]]:
    """Return completion and end of each job, in seconds of the trace."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sleeper.py").write_text(SLEEPER)
        folders = Folders(folder / "cluster")
        devices = tuple(f"cpu:{index}" for index in range(DEVICES))
        engine_local.start(folders, Settings(hosts={"h0": devices}, policy=policy))
        try:
            begin_s = time.monotonic()
            for job in jobs:
                time.sleep(max(0.0, begin_s + job.submit_s / faster - time.monotonic()))
                sleep_s = job.work_s / job.spec.gpus.minimum / faster
                words = (*job.spec.command, str(sleep_s))
                fields: dict[str, Any] = {"directory": name, "command": words}
                spec = codec.encode(dataclasses.replace(job.spec, **fields)).decode()
                ask = {"do": "submit", "spec": spec, "user": "benchmark"}
                engine_local.ask(folders, ask)
            while True:
                rows = engine_local.ask(folders, {"do": "list"})["jobs"]
                if all(row["ended_s"] is not None for row in rows):
                    break
                time.sleep(0.05)
        finally:
            engine_local.down(folders, timeout_s=30.0)
    first_s = min(row["submitted_s"] for row in rows)
    return {
        row["name"]: (
            (row["ended_s"] - row["submitted_s"]) * faster,
            (row["ended_s"] - first_s) * faster,
        )
        for row in rows
        if row["state"] == "done"
    }


def in_order(ends_s: dict[str, float], first: list[str], apart_s: float) -> bool:
    """Return whether jobs end in an order, but for ends closer than ``apart_s``."""
    return all(
        ends_s[before] <= ends_s[after] + apart_s
        for at, before in enumerate(first)
        for after in first[at + 1 :]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faster", type=float, default=100.0)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    jobs = trace_of(args.jobs, args.seed)
    costs_s = start_s(args.faster)
    policy = registry.get(args.policy)
    done = simulate(jobs, policy, gpus=DEVICES, start_s=costs_s)
    real = on_local_engine(jobs, args.policy, args.faster)
    simulated = {
        job.spec.name: (row.end_s - row.submit_s, row.end_s)
        for job, row in zip(jobs, done.jobs, strict=True)
        if row.end_s is not None
    }
    ratios = [abs(real[n][0] / simulated[n][0] - 1.0) for n in simulated]
    order = sorted(simulated, key=lambda name: simulated[name][1])
    ends_s = {name: real[name][1] for name in order}
    gaps = [simulated[b][1] - simulated[a][1] for a, b in itertools.pairwise(order)]
    store(
        "cluster_same_trace",
        {
            "policy": args.policy,
            "jobs": len(jobs),
            "seed": args.seed,
            "faster": args.faster,
            "start_s": costs_s / args.faster,
            "load_average_before": load,
            "preemptions": sum(row.preemptions for row in done.jobs),
            "done": [len(real), len(simulated)],
            "same_order": in_order(ends_s, order, 0.0),
            "smallest_gap_s": min(gaps),
            "completion_deviation_ratio": spread(ratios)
            | {"largest": max(ratios), "target": TARGET_RATIO},
        },
    )


if __name__ == "__main__":
    main()
