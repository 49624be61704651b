"""Train two jobs with each kind of compression; compare final loss and bytes sent.

    python benchmarks/compression.py --store

The jobs of `adam_sgd.py`, shorter: 2 ranks, AdamW with linear decay, three seeds, the
learning rates that `adam_sgd.py` found, the same plan for all. Bytes are those of a
rank's TCP connections, counted by the kernel, per step at the end of training. Neither
depends on the machine's load. About 5 minutes of processor time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import _ranks
from _plans import equal_buckets
from _record import store
from adam_sgd import Digits, Text, adamw
from stretto.compression import PowerSGD, TopK, power_sgd_hook, top_k_hook
from stretto.optim import LinearDecay
from stretto.runtime import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 2
SEEDS = (0, 1, 2)
MEASURED = 20  # steps whose bytes are counted


class Job(NamedTuple):
    data: Text | Digits
    rate: float
    steps: int


class Method(NamedTuple):
    wire: str = "float32"
    feedback: bool = False
    state: Callable[[int], object] | None = None  # of the number of steps
    hook: Callable | None = None


def power_sgd(rank: int) -> Method:
    """Whole gradients in a tenth of the steps, as PyTorch recommends."""
    return Method(state=lambda steps: PowerSGD(rank, steps // 10), hook=power_sgd_hook)


def top_k(ratio: float) -> Method:
    return Method(state=lambda _steps: TopK(ratio), hook=top_k_hook)


METHODS = {
    "float32": Method(),
    "bfloat16": Method("bfloat16"),
    "float16": Method("float16"),
    "bfloat16, error feedback": Method("bfloat16", feedback=True),
    "PowerSGD, rank 1": power_sgd(1),
    "PowerSGD, rank 4": power_sgd(4),
    "top-k, 1 %": top_k(0.01),
    "top-k, 10 %": top_k(0.1),
}


def sent_bytes() -> int:
    """Return what this process's TCP connections have sent, by Linux's ``tcp_info``."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as one:
                if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed since
        if len(info) >= 208:
            total += struct.unpack_from("=Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def trained(rank: int, job: Job, method: Method, seed: int) -> tuple[float, float]:
    """Train one model; return its validation loss and the bytes that a step sends."""
    torch.manual_seed(seed)
    draws = torch.Generator().manual_seed(RANKS * seed + rank)
    net = job.data.model()
    plan = equal_buckets(net, 128 << 10, RANKS, 2)
    plan = replace(
        plan, buckets=tuple(replace(b, wire_dtype=method.wire) for b in plan.buckets)
    )
    model = DistributedDataParallel(net, plan=plan, error_feedback=method.feedback)
    if method.state is not None:
        model.register_lane_hook(method.state(job.steps), method.hook)
    optimizer = adamw(list(model.parameters()), job.rate)
    schedule = LinearDecay(optimizer, job.steps, job.steps // 20)
    before = 0
    for step in range(job.steps):
        if step == job.steps - MEASURED:
            before = sent_bytes()
        x, y = job.data.batch(draws)
        half = slice(rank * len(x) // RANKS, (rank + 1) * len(x) // RANKS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[half]), y[half]).backward()
        optimizer.step()
        schedule.step()
    sent = (sent_bytes() - before) / MEASURED
    net.eval()
    with torch.no_grad():
        x, y = job.data.valid
        return float(nn.functional.cross_entropy(net(x), y)), sent


def rank_main(rank: int, _size: int, path: str, names: list[str]) -> None:
    jobs = {"text": Job(Text(), 0.01, 150), "digits": Job(Digits(), 0.003, 200)}
    found: dict[str, dict] = {}
    for name in names:
        job, found[name] = jobs[name], {}
        for method, how in METHODS.items():
            runs = []
            for seed in SEEDS:
                runs.append(trained(rank, job, how, seed))
                gc.collect()
                dist.barrier()
            losses = [loss for loss, _ in runs]
            row = {
                "mean": statistics.mean(losses),
                "min": min(losses),
                "max": max(losses),
                "losses": losses,
                "bytes_per_step": round(statistics.median(sent for _, sent in runs)),
            }
            found[name][method] = row
            whole = found[name]["float32"]["bytes_per_step"]
            row["share_of_float32"] = row["bytes_per_step"] / whole
            if rank == 0:
                sys.stderr.write(
                    f"{name}, {method}: {row['mean']:.4f} ({row['min']:.4f} to "
                    f"{row['max']:.4f}), {row['bytes_per_step']:,} bytes, "
                    f"{row['share_of_float32']:.3f}, after {time.process_time():.0f} s "
                    "of this rank\n"
                )
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="Write the result file.")
    parser.add_argument("--job", action="append", choices=("text", "digits"))
    options = parser.parse_args()
    path = Path(f"/tmp/compression-{os.getpid()}.json")
    try:
        _ranks.run(
            rank_main,
            RANKS,
            str(path),
            options.job or ["text", "digits"],
            timeout_s=3600,
        )
        found = json.loads(path.read_text())
    finally:
        path.unlink(missing_ok=True)
    if options.store:
        what = "validation loss, three seeds; bytes that a rank sends per step"
        store("compression", {"what": what, "ranks": RANKS, **found})


if __name__ == "__main__":
    main()
