"""Predicted against measured steps of replayed plans on the emulated cluster.

    .venv/bin/python benchmarks/replay.py [--rounds 3] [--networks capped uncapped]

Each network is probed once. Then plans of several methods are replayed in turns, round
by round, so that a noisy moment affects all of them: computation is waiting, as on a
device of its own. Stores each replay's predicted and measured step in
results/replay.json. The target is a difference of at most 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import stretto
from _record import store
from stretto.errors import StrettoError
from stretto.schema import Cluster, TensorSpec, Workload

HOSTS = 4
NETWORKS = {"capped": "300mbit", "uncapped": None}
LAYERS, BYTES = 12, 21_000_000
TIMES_S = {
    "balanced": (0.087, 0.173),
    "communication-bound": (0.033, 0.067),
    "compute-bound": (0.173, 0.347),
}
"""Forward and backward; communication takes about 0.26 s."""

FORWARD = {"dims": "fusion,lanes,slices,forward"}
METHODS = {
    "ddp": ("ddp", {}),
    "mg-wfbp": ("mg-wfbp", {}),
    "joint": ("joint", {}),
    "joint, forward": ("joint", FORWARD),
}


def layered(name: str) -> Workload:
    """Return equal layers; each is needed in the opposite order of readiness."""
    forward_s, backward_s = TIMES_S[name]
    return Workload(
        name=name,
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"layer{LAYERS - 1 - i}.weight",
                bytes=BYTES // LAYERS // 4 * 4,
                dtype="float32",
                ready_s=0.999 * backward_s * (i + 1) / LAYERS,
                needed_s=forward_s * (LAYERS - 1 - i) / LAYERS,
            )
            for i in range(LAYERS)
        ),
    )


def in_lab(network: str, *command: object) -> str:
    """Run a command of stretto on the emulated cluster; return rank 0's output."""
    flow = NETWORKS[network]
    lab = ["lab", "run", "--hosts", HOSTS, "--link", "1gbit", "--timeout", "300"]
    lab += ["--flow", flow] if flow else []
    words = [sys.executable, "-m", "stretto", *lab, "--", sys.executable, "-m"]
    words += ["stretto", *command]
    done = subprocess.run(
        list(map(str, words)),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=330,
        check=True,
    )
    return done.stdout


def measured(network: str, folder: Path, rounds: int, steps: int) -> list[dict]:
    """Return a row per workload and method on one network."""
    cluster_file = folder / f"{network}.json"
    in_lab(network, "probe", "-o", cluster_file, "--no-contention")
    cluster = Cluster.load(cluster_file)
    cases = []
    for name in TIMES_S:
        workload = layered(name)
        workload.save(folder / f"{name}.json")
        for method, (planner, options) in METHODS.items():
            plan = stretto.plan(workload, cluster, planner, **options)
            if method == "joint, forward" and plan.overlap != "forward":
                continue
            path = folder / f"{network} {name} {method}.json"
            plan.save(path)
            cases.append((name, method, path, plan))
    found: dict[Path, list[dict]] = {path: [] for _, _, path, _ in cases}
    for _ in range(rounds):
        for name, _, path, _ in cases:
            words = ["replay", folder / f"{name}.json", "--plan", path, "--json"]
            words += ["--cluster", cluster_file, "--steps", steps]
            found[path].append(json.loads(in_lab(network, *words)))
    rows = []
    for name, method, path, plan in cases:
        steps_s = sorted(s for one in found[path] for s in one["steps_s"])
        predicted_s = found[path][0]["predicted_s"]
        measured_s = statistics.median(steps_s)
        rows.append(
            {
                "network": network,
                "workload": name,
                "method": method,
                "buckets": len(plan.buckets),
                "lanes": plan.lanes,
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "min_s": steps_s[0],
                "quartiles_s": statistics.quantiles(steps_s, n=4),
                "rounds_s": [one["measured_s"] for one in found[path]],
                "error": predicted_s / measured_s - 1,
                "bound_s": plan.predicted.lower_bound_s,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS)
    )
    args = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for network in args.networks:
            rows += measured(network, Path(folder), args.rounds, args.steps)
    errors = [abs(row["error"]) for row in rows]
    result = {
        "what": f"replays on {HOSTS} emulated hosts, 1 Gbit/s links; flows of 300 "
        "Mbit/s (capped) or the link's rate; computation is waiting",
        "target": {"max_error": 0.05},
        "load_average": os.getloadavg(),
        "mean_error": statistics.fmean(errors),
        "worst_error": max(errors),
        "rows": rows,
    }
    store("replay", result)


if __name__ == "__main__":
    try:
        main()
    except StrettoError as error:
        sys.exit(f"benchmarks/replay.py: {error}")
