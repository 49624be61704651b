"""Measure a burst foreground on four hosts with a background job beside each rank.

    stretto lab run --hosts 4 --link 1gbit -- python benchmarks/background_burst.py

VGG-11 is profiled, planned and trained as in `burst_run.py`. Each rank is the
foreground of its own device ``cpu:RANK``, and starts a background that trains a small
network on it, in tasks of some milliseconds. Blocks of steps alternate: the foreground
alone, both, the backgrounds alone. Results are ratios within one cycle: the
foreground's loss; each job's rate beside the other over its rate alone; and their sum,
the throughput of the cluster over that of the foreground alone. Target: a loss of at
most 5 %, a throughput of at least 1.5.

Hosts share the machine's processors: with fewer processors than hosts, four devices are
emulated by less than four, and backgrounds get the less. With ``--sleep-ms 400`` each
rank has an emulated device ``exclusive:RANK`` of its own instead: computation sleeps,
400 ms for a step of VGG-11 on one device, and tasks sleep for ``--task-ms``. These
processes get real-time priority if permitted, so that they wake on time.

The result has an account by rank: the share of a step in which its device is idle,
how much of that tasks used, and why the rest was not used. Control steps are one in 64
only after some 200 steps: let these pass with ``--settle``. Bounds of the throughput
follow from the idle shares, measured and simulated.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _record import on_time, spread, store
from burst_run import cores, start
from stretto._api.burst import simulate
from stretto.background.pacing import PERIODS
from stretto.background.windows import usable_s, windows_of
from stretto.burst.executor import BUCKET_BYTES
from stretto.demo.background_job import BackgroundJob

SETTLING_S = 1.5


def gathered(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def account(statistics: dict) -> dict:
    """Return where a rank's idle time beside the foreground went, as shares of it."""
    idle_s, unused_s = statistics["idle_s"], statistics["unused_s"]
    return {
        "idle": idle_s / statistics["steps_s"],
        "used": statistics["beside_s"] / idle_s,
        **{reason: seconds / idle_s for reason, seconds in unused_s.items()},
    }


def bounds(options, accounts: list[dict], step: Any) -> dict:
    """Return what the throughput can be at most, if the foreground loses nothing.

    ``idle``: every idle moment is used. ``whole_tasks``: whole tasks, in windows whose
    ends are known. ``control_steps``: and none in one step of 64, as once the loss is
    clearly small.
    """
    ranks = len(accounts)
    idle = fmean(step.idle_s) / step.iteration_s
    found = {
        "idle_measured": 1.0 + fmean(each["idle"] for each in accounts),
        "idle": 1.0 + idle,
    }
    if options.sleep_ms:
        used_s = fmean(
            usable_s(windows_of(step.timeline, rank), 1e-3 * options.task_ms)
            for rank in range(ranks)
        )
        used = used_s / step.iteration_s
        found["whole_tasks"] = 1.0 + used
        found["control_steps"] = 1.0 + used * (1.0 - 1.0 / PERIODS[-1])
    return found


def main() -> None:
    options = arguments()
    if options.sleep_ms:
        on_time()
    model, x, y, cluster, profile, plan = start(options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    burst = stretto.BurstParallel(copy.deepcopy(model), plan, example_inputs=(x[:2],))
    burst.predict_windows(profile, cluster, cores=cores(options))
    optimizer = torch.optim.SGD(burst.parameters(), lr=0.01)
    sleeps = bool(options.sleep_ms)
    device = f"{'exclusive' if sleeps else 'cpu'}:burst{rank}"
    beside = BackgroundJob(device, task_s=1e-3 * options.task_ms if sleeps else None)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(burst(x), y).backward()
        optimizer.step()

    def steps(count: int) -> float:
        """Return the seconds of a step, the same on all ranks."""
        for _ in range(3):
            step()
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(count):
            step()
        return max(gathered((time.perf_counter() - begin_s) / count))

    def rate(seconds: float | None, count: int) -> tuple[float, float]:
        """Return the tasks a second of all backgrounds, and a step's seconds."""
        before = beside.progress()
        step_s = 0.0
        if seconds is None:
            step_s = steps(count)
        else:
            time.sleep(seconds)
        after = beside.progress()
        mine = (after[0] - before[0]) / (after[1] - before[1])
        return sum(gathered(mine)), step_s

    if sleeps:
        on_time()  # with the threads that have been started since
        on_time(beside.pid)
    steps(5)
    rows = []
    for _ in range(options.cycles):
        alone_before_s = steps(options.block)
        with stretto.Foreground(device):
            beside.run()
            steps(options.settle or options.block)  # windows and limits are learned
            together, step_s = rate(None, 2 * options.block)
        beside.stop()
        alone_after_s = steps(options.block)
        dist.barrier()
        beside.run()
        time.sleep(SETTLING_S)
        alone, _ = rate(options.alone_s, 0)
        beside.stop()
        dist.barrier()
        alone_s = fmean((alone_before_s, alone_after_s))
        rows.append(
            {
                "loss": step_s / alone_s - 1.0,
                "background": together / alone,
                "throughput": alone_s / step_s + together / alone,
                "step_alone_s": alone_s,
                "step_beside_s": step_s,
                "tasks_per_s_alone": alone,
            }
        )
    beside.close()
    accounts = gathered(account(beside.statistics))
    simulated = simulate(
        profile, plan, cluster, bucket_bytes=BUCKET_BYTES, cores=cores(options)
    )
    if rank == 0:
        store(
            options.store,
            {
                "what": f"VGG-{options.depth}, width {options.width}, batch "
                f"{options.batch}, over {ranks} hosts on {os.cpu_count()} processors, "
                "with a background beside each rank"
                + (
                    f"; devices emulated: {options.sleep_ms:g} ms for a step on one, "
                    f"tasks of {options.task_ms:g} ms"
                    if sleeps
                    else ""
                ),
                "reach": "loss at most 5 %; throughput at least 1.5 of alone",
                "isolation": beside.isolation,
                "load_before": os.getloadavg()[0],
                "layers": {e.layer: [e.first_gpu, e.gpus] for e in plan.layers},
                **{key: spread([row[key] for row in rows]) for key in rows[0]},
                "by_rank": accounts,
                "bounds": bounds(options, accounts, simulated),
                "cycles": rows,
            },
        )
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=11)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dense", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--block", type=int, default=20, help="steps of one in a row")
    parser.add_argument(
        "--settle", type=int, default=0, help="steps beside, before those that count"
    )
    parser.add_argument("--alone-s", type=float, default=3.0)
    parser.add_argument("--probe-s", type=float, default=15.0)
    parser.add_argument("--min-layer-s", type=float, default=50e-6)
    parser.add_argument("--sleep-ms", type=float, default=0.0)
    parser.add_argument("--task-ms", type=float, default=2.0)
    parser.add_argument(
        "--store", default="background_burst", help="name of the result"
    )
    found = parser.parse_args()
    found.model = "vgg"
    return found


if __name__ == "__main__":
    main()
