"""Compare `deeppool` with `partition` on emulated devices: one foreground, backgrounds.

Four emulated devices without preemption (`exclusive`), a stand-in for VGG-11 with a
batch of 16, and four background jobs. Devices and jobs sleep instead of computing: the
foreground's ranks follow the windows of its simulated step, data parallel on half of
the devices under `partition`, by a burst plan (amplification limit 1.5, four hosts with
10 GB/s) on as many as `deeppool` chooses, which are two. Both policies, the cluster,
and the backgrounds' leases are the real ones. Ranks do not wait for each other.

The target is 1.2 times the throughput of all jobs, with a foreground that is no slower.
Throughput counts in devices: the foreground's speed-up over one device, and each
background's tasks over those that it would run alone. Rounds alternate. About two
minutes; ``--rounds 1 --seconds 5`` is the short form.

    .venv/bin/python benchmarks/cluster_policies.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from _record import on_time, spread, store
from stretto import zoo
from stretto.cluster import engine_local
from stretto.cluster.folders import Folders, Settings
from stretto.cost import cluster_at
from stretto.cost.burst import BurstNetwork
from stretto.planners.burst.plan import same_width
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on, simulate
from stretto.schema import Cluster, codec
from stretto.schema.collocation import CollocatedPair, Collocation
from stretto.schema.job import (
    BACKGROUND,
    FOREGROUND,
    BurstOptions,
    GpuRange,
    Job,
)

DEVICES, BATCH, LIMIT, BACKGROUNDS = 4, 16, 1.5, 4
TASK_S = 0.004
TARGET = 1.2
POLICIES = ("partition", "deeppool")


# the jobs, in processes of their own


def run_job() -> None:
    on_time()
    if "STRETTO_BACKGROUND" in os.environ:
        run_background()
    else:
        run_foreground()


def run_foreground() -> None:
    import stretto

    kind = "burst" if "STRETTO_CLUSTER_PLAN" in os.environ else "strong"
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    segments = json.loads(Path("segments.json").read_text())[f"{kind}{ranks}"]
    mine = segments[int(rank)]
    job = stretto.Foreground(os.environ["STRETTO_FOREGROUND"])
    with Path(f"steps{rank}").open("w", buffering=1) as file:
        while True:
            job.step()
            for compute_s, wait_s in mine:
                time.sleep(compute_s)
                with job.waiting("network"):
                    time.sleep(wait_s)
            file.write(f"{time.monotonic()}\n")


def run_background() -> None:
    import stretto

    job = stretto.Background(os.environ["STRETTO_BACKGROUND"])
    path = Path(f"tasks-{os.environ['STRETTO_CLUSTER_JOB']}")
    with path.open("w", buffering=1) as file:
        while True:
            with job.lease():
                time.sleep(TASK_S)
            file.write(f"{time.monotonic()}\n")


# the cluster


def network() -> Cluster:
    known = zoo.cluster("deeppool")
    link = replace(known.inter_host, bandwidth_bytes_per_s=10e9)
    return replace(
        known,
        hosts=DEVICES,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=None,
    )


def foreground(folder: Path) -> Job:
    return Job(
        name="vgg",
        role=FOREGROUND,
        command=(sys.executable, str(Path(__file__).resolve()), "--job"),
        launch="direct",
        directory=str(folder),
        gpus=GpuRange(minimum=2, maximum=DEVICES),
        batch=BATCH,
        burst=BurstOptions(
            factory="vgg.py:make", amplification_limit=LIMIT, profile="layers.json"
        ),
    )


def segments_of(folder: Path) -> dict[str, list[list[tuple[float, float]]]]:
    """Return computation and waits of each rank's step, by method and ranks."""
    profile, found = zoo.layer_profile("vgg11", samples=(1, 2, 4, 8, 16)), {}
    profile.save(folder / "layers.json")
    for ranks in (1, 2, DEVICES):
        resized = cluster_at(network(), ranks)
        problem = BurstProblem.of(
            profile,
            BurstNetwork.of(resized, ranks),
            gpus=ranks,
            batch=BATCH,
            widths="powers",
            amplification_limit=LIMIT,
        )
        strong = simulate(profile, same_width(problem, ranks), resized)
        burst = plan_on(problem, resized)[1]
        for kind, step in (("strong", strong), ("burst", burst)):
            rows = []
            for windows in step.windows:
                at_s, row = 0.0, []
                for window in windows:
                    row.append((max(0.0, window.begin_s - at_s), window.length_s))
                    at_s = window.begin_s + window.length_s
                row.append((max(0.0, step.iteration_s - at_s), 0.0))
                rows.append(row)
            found[f"{kind}{ranks}"] = rows
    return found


def pair() -> CollocatedPair:
    """Return what the leases give: the part of a window that whole tasks fill."""
    return CollocatedPair(
        foreground="vgg",
        background="tasks",
        device="exclusive",
        policy="fits",
        depth=1,
        task_s=TASK_S,
        usable_ratio=0.8,
        loss_ratio=0.02,
        loss_spread_ratio=0.0,
        share_ratio=0.5,
        share_spread_ratio=0.0,
        pairs=8,
    )


def times_in(path: Path, begin_s: float, end_s: float) -> list[float]:
    if not path.exists():
        return []
    found = [float(line) for line in path.read_text().splitlines() if "." in line]
    return [each for each in found if begin_s <= each <= end_s]


def measured(policy: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segments = segments_of(folder)
        (folder / "segments.json").write_text(json.dumps(segments))
        Collocation(rows=(pair(),)).save(folder / "pairs.json")
        network().save(folder / "network.json")
        folders = Folders(folder / "cluster")
        devices = tuple(f"exclusive:policies{index}" for index in range(DEVICES))
        settings = Settings(
            hosts={"h0": devices},
            policy=policy,
            network=str(folder / "network.json"),
            collocation=str(folder / "pairs.json"),
        )
        engine_local.start(folders, settings)
        try:
            jobs = [submit(folders, foreground(folder))]
            await_running(folders, jobs[0])
            spec = replace(
                foreground(folder),
                name="tasks",
                role=BACKGROUND,
                gpus=GpuRange(minimum=1, maximum=1),
                batch=None,
                burst=None,
            )
            jobs += [submit(folders, spec) for _ in range(BACKGROUNDS)]
            time.sleep(2.0 + seconds / 4)  # processes start, windows are learned
            begin_s = time.monotonic()
            time.sleep(seconds)
            end_s = time.monotonic()
            shown = engine_local.ask(folders, {"do": "show", "job": jobs[0]})
            ranks = len(shown["devices"])
            steps = [
                len(times_in(folder / f"steps{rank}", begin_s, end_s))
                for rank in range(ranks)
            ]
            tasks = [
                len(times_in(folder / f"tasks-{job}", begin_s, end_s))
                for job in jobs[1:]
            ]
        finally:
            for job in jobs:
                engine_local.ask(folders, {"do": "stop", "job": job})
            engine_local.down(folders, timeout_s=30.0)
    alone_s = sum(map(sum, segments["strong1"][0]))
    speed = min(steps) / seconds * alone_s
    rates = [number * TASK_S / seconds for number in tasks]
    return {
        "ranks": ranks,
        "method": shown["method"],
        "foreground": speed,
        "backgrounds": rates,
        "total": speed + sum(rates),
    }


def submit(folders: Folders, job: Job) -> str:
    spec = codec.encode(job).decode()
    found = engine_local.ask(folders, {"do": "submit", "spec": spec, "user": "b"})
    return str(found["job"])


def await_running(folders: Folders, job: str) -> None:
    while engine_local.ask(folders, {"do": "show", "job": job})["state"] != "running":
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run_job()
        return
    load, rows = os.getloadavg()[0], {policy: [] for policy in POLICIES}
    for number in range(args.rounds):
        for policy in POLICIES if number % 2 else POLICIES[::-1]:
            rows[policy].append(measured(policy, args.seconds))
            sys.stdout.write(f"{policy}: {rows[policy][-1]}\n")
    ratios = [
        two["total"] / one["total"]
        for one, two in zip(rows["partition"], rows["deeppool"], strict=True)
    ]
    speeds = {
        policy: statistics.median(row["foreground"] for row in each)
        for policy, each in rows.items()
    }
    store(
        "cluster_policies",
        {
            "load_average_before": load,
            "seconds": args.seconds,
            "rounds": rows,
            "foreground_speed": speeds,
            "total_ratio": spread(ratios) | {"target": TARGET},
        },
    )


if __name__ == "__main__":
    main()
