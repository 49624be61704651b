"""Time the simulator on large clusters, with the ledger and policies of a real one.

    .venv/bin/python benchmarks/cluster_simulate.py [--policy fifo] [--runs 1]

Jobs are drawn by a seed: exponential times between submissions and exponential
durations, 1 to 16 GPUs, 30 % backgrounds, 90 % load. Times are of the processor: other
work on the machine lengthens them less. Stores results/cluster_simulate.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from _record import store
from stretto.cluster.engine_sim import SimulatedJob, simulate
from stretto.cluster.policies import registry
from stretto.schema.job import BACKGROUND, FOREGROUND, GpuRange, Job

CASES = (
    ("20,000 jobs on 6,480 GPUs", 20_000, 6_480, 2.0),
    ("100,000 jobs on 1,024 GPUs", 100_000, 1_024, 15.0),
)
SIZES = [1] * 60 + [2] * 15 + [4] * 12 + [8] * 10 + [16] * 3
MEAN_S = 3600.0
LOAD = 0.9


def jobs_of(number: int, gpus: int) -> list[SimulatedJob]:
    draw = random.Random(1)
    specs: dict[tuple[str, int], Job] = {}
    at_s, found = 0.0, []
    for _ in range(number):
        at_s += draw.expovariate(LOAD * gpus / (statistics.fmean(SIZES) * MEAN_S))
        role = BACKGROUND if draw.random() < 0.3 else FOREGROUND
        size = draw.choice(SIZES)
        if (role, size) not in specs:
            specs[role, size] = Job(
                name="job",
                role=role,
                command=("train.py",),
                directory="/",
                gpus=GpuRange(minimum=size, maximum=size),
            )
        work_s = draw.expovariate(1 / MEAN_S) * size
        found.append(SimulatedJob(spec=specs[role, size], submit_s=at_s, work_s=work_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    rows = {}
    for title, number, gpus, reach_s in CASES:
        jobs = jobs_of(number, gpus)
        times = []
        for _ in range(args.runs):
            begin_s = time.process_time()
            done = simulate(jobs, registry.get(args.policy), gpus=gpus)
            times.append(time.process_time() - begin_s)
        ended = sum(job.end_s is not None for job in done.jobs)
        rows[title] = {
            "policy": args.policy,
            "processor_s": statistics.median(times),
            "fastest_s": min(times),
            "runs": args.runs,
            "target_s": reach_s,
            "ended": ended,
        }
        print(f"{title}: {min(times):.2f} s of the processor, target {reach_s:g} s")
    store("cluster_simulate", {"load": LOAD, "cases": rows})


if __name__ == "__main__":
    main()
