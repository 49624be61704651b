"""Compare local lanes with Gloo over loopback, ranks on one host.

For each size one bucket is reduced in as many slices as lanes, on both backends in
turn. Ratios below 1 mean that local lanes are faster. A turn's time is the slowest
rank's, from a common start. CPU time is that of a rank's whole process.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from _ranks import run
from _record import spread, store
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of

SIZES_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
LANES = (1, 4)
RANKS = (2, 4)
TURNS = 5 if "--short" in sys.argv else 41
BACKENDS = ("gloo", "local")


def slowest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def reduce_on(lanes: list, message: torch.Tensor) -> None:
    pieces = message.chunk(len(lanes))
    works = [lane.allreduce([piece]) for lane, piece in zip(lanes, pieces, strict=True)]
    for work in works:
        work.wait()


def measure(rank: int, size: int) -> None:
    ranks = ranks_of(dist.group.WORLD, timeout_s=120.0)
    lanes: dict[str, list] = {}
    for name in BACKENDS:
        pool = LanePool(ranks, serial=name, backend=name, device=torch.device("cpu"))
        lanes[name] = [pool.lane(number) for number in range(max(LANES))]
    found = {}
    for size_bytes in SIZES_BYTES:
        message = torch.zeros(size_bytes // 4)
        repeat = max(1, min(20, 2**20 // size_bytes))
        for count in LANES:
            times_s: dict[str, list[float]] = {name: [] for name in BACKENDS}
            cpu_s: dict[str, list[float]] = {name: [] for name in BACKENDS}
            for turn in range(TURNS + 1):
                for name in BACKENDS[:: 1 if turn % 2 else -1]:
                    dist.barrier()
                    begin, cpu = time.perf_counter(), time.process_time()
                    for _ in range(repeat):
                        reduce_on(lanes[name][:count], message)
                    took_s = slowest((time.perf_counter() - begin) / repeat)
                    used_s = (time.process_time() - cpu) / repeat
                    if turn:
                        times_s[name].append(took_s)
                        cpu_s[name].append(used_s)
            found[f"{size_bytes} bytes, {count} lanes"] = {
                "gloo_s": spread(times_s["gloo"]),
                "local_s": spread(times_s["local"]),
                "ratio": spread(ratios(times_s)),
                "cpu_ratio": spread(ratios(cpu_s)),
            }
    if rank == 0:
        store(
            f"local_lanes_{size}",
            {"what": "local over gloo, one bucket", "ranks": size, "by_case": found},
        )


def ratios(values: dict[str, list[float]]) -> list[float]:
    return [b / a for a, b in zip(values["gloo"], values["local"], strict=True)]


if __name__ == "__main__":
    for size in RANKS:
        run(measure, size)
