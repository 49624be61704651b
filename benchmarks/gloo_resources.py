# ruff: noqa: SLF001
"""Measure how threads, connections and lanes speed up one all-reduce on Gloo.

The measurement behind Note [What resource means on Gloo]. Run it where connections are
capped, for instance

  stretto lab run --hosts 2 --link 1gbit --flow 150mbit -- \
    python benchmarks/gloo_resources.py

Ways are interleaved; rank 0 stores the result.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from _record import spread, store

SIZES_BYTES = (256 * 1024, 4 * 2**20)
TURNS = 3 if "--short" in sys.argv else 15
PIECES = 4


def open_backend(name: str, connections: int, threads: int):
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device() for _ in range(connections)]
    options._threads = threads
    options._timeout = timedelta(seconds=120)
    shared = dist.distributed_c10d._get_default_store()
    prefix = dist.PrefixStore(name, shared)
    return gloo(prefix, dist.get_rank(), dist.get_world_size(), options)


def reduce_on(backends: list, message: torch.Tensor) -> None:
    works = [
        backend.allreduce([piece])
        for backend, piece in zip(backends, message.chunk(len(backends)), strict=True)
    ]
    for work in works:
        work.wait()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    plain = open_backend("plain", 1, 2)
    threads = open_backend("threads", 1, 8)
    connections = open_backend("connections", PIECES, PIECES)
    lanes = [open_backend(f"lane {i}", 1, 2) for i in range(PIECES)]
    ways = {
        "1 connection, 2 threads, whole": [plain],
        "1 connection, 8 threads, whole": [threads],
        "1 connection, 8 threads, 4 pieces": [threads] * PIECES,
        "4 connections, 4 threads, whole": [connections],
        "4 connections, 4 threads, 4 pieces": [connections] * PIECES,
        "4 lanes, 4 slices": lanes,
    }
    found: dict[str, dict] = {}
    for size_bytes in SIZES_BYTES:
        message = torch.zeros(size_bytes // 4)
        times_s: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS + 1):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                begin = time.perf_counter()
                reduce_on(ways[name], message)
                if turn:
                    times_s[name].append(time.perf_counter() - begin)
        base_s = times_s["1 connection, 2 threads, whole"]
        found[str(size_bytes)] = {
            name: {
                "s": spread(values),
                "ratio": spread([a / b for a, b in zip(values, base_s, strict=True)]),
            }
            for name, values in times_s.items()
        }
    if dist.get_rank() == 0:
        store(
            "gloo_resources",
            {
                "what": "one all-reduce: time, and over 1 connection with 2 threads",
                "ranks": dist.get_world_size(),
                "by_bytes": found,
            },
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
