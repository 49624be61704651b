"""Burst-parallel training against one process, every model on 1 to 4 ranks.

    python benchmarks/burst_equality.py [--plans N] [--short]

20 steps of random plans with even, uneven and one-sided shares: the largest relative
difference of loss, of gradients at every step, and of the state afterwards. Reach: 1e-5
in float32, 1e-10 in float64. Activations are smooth: with ReLU, rounding switches units
on and off. Batch norms over few values amplify rounding step by step, so the models
that have them train with a small learning rate.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from _record import store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "dist"))
import burst_ranks

RATES = {
    "vgg11": 0.01,
    "vgg16": 0.01,
    "transformer": 0.01,
    "inception": 1e-4,
    "wide resnet": 1e-4,
}
SHARES = ("even", "uneven", "one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=3, help="random ones of each case")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--short", action="store_true", help="to see that it runs")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.short:
        options.plans, options.steps = 1, 3
    if "RANK" in os.environ:
        run(options)
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found"
            launch(size, [*sys.argv[1:], "--out", str(out)])
            for key, value in torch.load(out).items():
                found.setdefault(key, {})[f"{size} ranks"] = value
    store(
        "burst_equality_short" if options.short else "burst_equality",
        {
            "what": f"largest relative difference from one process in {options.steps} "
            f"steps, {options.plans} random plans for each of {len(SHARES)} kinds of "
            "shares",
            "reach": "1e-5 in float32, 1e-10 in float64",
            "differences": found,
        },
    )


def launch(size: int, arguments: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments], env=environment | {"RANK": str(r)}
        )
        for r in range(size)
    ]
    try:
        failed = [p.wait(timeout=1800) for p in processes]
    finally:
        for process in processes:
            process.kill()
    if any(failed):
        raise SystemExit(f"ranks ended with {failed}")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for kind, rate in RATES.items():
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            worst = {"loss": 0.0, "grad": 0.0, "state": 0.0}
            for seed in range(options.plans * len(SHARES)):
                case = burst_ranks.compare(
                    kind,
                    rank,
                    size,
                    seed=seed,
                    shares=SHARES[seed % len(SHARES)],
                    steps=options.steps,
                    lr=rate,
                    dtype=dtype,
                )
                for what, value in case.items():
                    everyone = torch.tensor(value, dtype=torch.float64)
                    dist.all_reduce(everyone, dist.ReduceOp.MAX)
                    worst[what] = max(worst[what], float(everyone))
            name = str(dtype).removeprefix("torch.")
            found[f"{kind}, {name}"] = worst
            if rank == 0:
                print(f"{size} ranks, {kind}, {name}: {worst}", file=sys.stderr)
    if rank == 0:
        torch.save(found, options.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
