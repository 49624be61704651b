"""Time `stretto plan --planner joint` on 500 tensors, whole process.

    .venv/bin/python benchmarks/plan_speed.py [--runs 7] [--tensors 500]

Then over all dimensions (`--dims all`) for DenseNet-201's 604 tensors on 2048 ranks:
once cold, without any compiled Python file, then warm. Stores medians and spread in
results/plan_speed.json, with machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _record import spread, store
from stretto import zoo
from stretto.schema import Cluster, Link, TensorSpec, Workload

CLUSTERS = {
    "1 Gbit/s, flows 300 Mbit/s, 4 hosts": (4, 117e6, 36e6, 1.7e-4),
    "10 Gbit/s, 8 hosts": (8, 1.18e9, None, 2e-5),
    "1 Gbit/s, flows 300 Mbit/s, 64 hosts": (64, 117e6, 36e6, 2e-5),
}


def workload_of(number: int) -> Workload:
    """Return a convolutional network's mixture: most tensors tiny, the large ones late.

    Every tensor has a different ready time, which is the hardest case for a search.
    """
    rng = random.Random(500)
    backward_s = 0.18
    weights = sorted(rng.random() for _ in range(number))
    tensors = []
    for i, at in enumerate(weights):
        scale = 2**14 if rng.random() < 0.35 else 256
        size = 4 * int(scale * 2 ** rng.uniform(0, 5))
        tensors.append(
            TensorSpec(
                name=f"layer{number - i}.weight",
                bytes=size,
                dtype="float32",
                ready_s=at * backward_s,
                needed_s=(1 - at) * 0.09,
            )
        )
    return Workload(
        name=f"synthetic-{number}",
        framework="none",
        device="none",
        batch_per_rank=32,
        forward_s=0.09,
        backward_s=backward_s,
        tensors=tuple(tensors),
    )


def cluster_of(name: str) -> Cluster:
    hosts, link, flow, latency_s = CLUSTERS[name]
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=1,
        inter_host=Link(
            latency_s=latency_s, bandwidth_bytes_per_s=link, stream_bytes_per_s=flow
        ),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=1e10),
    )


ALL_DIMS = {
    "ASC-WFBP's testbed, 2048 ranks": ("asc", 512),
    "LIBRA's testbed, 2048 ranks, contention": ("libra", 2048),
}


def timed(command: list[str], *, pycache: str | None = None) -> tuple[float, str]:
    env = dict(os.environ)
    if pycache is not None:
        env["PYTHONPYCACHEPREFIX"] = pycache
    begin_s = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, env=env
    )
    return time.perf_counter() - begin_s, done.stdout


def over_all_dims(runs: int) -> list[dict]:
    """Time `stretto plan --dims all` on 604 tensors, 2048 ranks: cold, then warm."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        workload_file = Path(folder, "workload.json")
        workload = zoo.workload("densenet201")
        workload.save(workload_file)
        for name, (cluster, hosts) in ALL_DIMS.items():
            cluster_file = Path(folder, "cluster.json")
            zoo.cluster(cluster, hosts).save(cluster_file)
            command = [sys.executable, "-m", "stretto", "plan"]
            command += [str(workload_file), str(cluster_file)]
            command += ["--dims", "all", "--json"]
            pycache = str(Path(folder, "pycache", cluster))
            cold_s, _ = timed(command, pycache=pycache)
            done = [timed(command, pycache=pycache) for _ in range(runs)]
            cases.append(
                {
                    "cluster": name,
                    "tensors": len(workload.tensors),
                    "cold_s": cold_s,
                    "warm_s": spread([duration_s for duration_s, _ in done]),
                    "reach": {"cold_s": 3.0, "warm_s": 1.0},
                    "plan": json.loads(done[0][1]),
                }
            )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tensors", type=int, default=500)
    args = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        workload_file = Path(folder, "workload.json")
        workload = workload_of(args.tensors)
        workload.save(workload_file)
        for name in CLUSTERS:
            cluster_file = Path(folder, "cluster.json")
            cluster_of(name).save(cluster_file)
            command = [sys.executable, "-m", "stretto", "plan"]
            command += [str(workload_file), str(cluster_file), "--planner", "joint"]
            command += ["-o", str(Path(folder, "plan.json")), "--json"]
            runs = [timed(command) for _ in range(args.runs)]
            cases.append(
                {
                    "cluster": name,
                    "process_s": spread([duration_s for duration_s, _ in runs]),
                    "plan": json.loads(runs[0][1]),
                }
            )
    result = {
        "what": "stretto plan --planner joint, whole process",
        "tensors": args.tensors,
        "total_bytes": workload.total_bytes,
        "reach_s": 2.0,
        "cases": cases,
        "all_dimensions": over_all_dims(args.runs),
    }
    store("plan_speed", result)


if __name__ == "__main__":
    main()
