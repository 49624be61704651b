"""Lanes on NCCL: sums, CTAs, overlap, families, an end."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.measure.network import probe_network
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of

DEVICE = torch.device("cuda", 0)
LARGE = 16 * 2**20  # elements: enough that NCCL takes all the CTAs it is given


def pool(serial: int) -> LanePool:
    ranks = ranks_of(dist.group.WORLD, timeout_s=60.0)
    return LanePool(ranks, serial=serial, backend="nccl", device=DEVICE)


def kernels(profile: Any) -> list[dict[str, Any]]:
    """NCCL's kernels in a trace: first block of the grid, begin and end in us."""
    path = Path(tempfile.mkdtemp()) / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [
        {
            "ctas": event["args"]["grid"][0],
            "begin": event["ts"],
            "end": event["ts"] + event["dur"],
            "stream": event["args"]["stream"],
        }
        for event in events
        if event.get("cat") == "kernel" and "ncclDevKernel" in event["name"]
    ]


def traced(work: Any) -> list[dict[str, Any]]:
    work()  # connections are made at the first collective
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return kernels(profile)


def rank_sums_and_traces(rank: int, size: int) -> dict[str, Any]:
    lanes = pool(1)
    opened = lanes.open([(0, 2), (0, 8), (1, 4), (2, None)])
    found: dict[str, Any] = {"sums": {}, "ctas": {}}
    for need, lane in opened.items():
        message = torch.full((1000,), float(rank + 1), device=DEVICE)
        lane.allreduce([message]).wait()
        wanted = size * (size + 1) / 2
        found["sums"][need] = bool((message == wanted).all().item())
    messages = [torch.ones(LARGE, device=DEVICE) for _ in range(2)]
    for need in ((0, 2), (0, 8), (1, 4)):
        lane = opened[need]
        seen = traced(lambda lane=lane: lane.allreduce([messages[0]]).wait())
        found["ctas"][need] = [kernel["ctas"] for kernel in seen]

    def both(first: Any, second: Any) -> Any:
        def launch() -> None:
            works = [
                lane.allreduce([message])
                for lane, message in zip((first, second), messages, strict=True)
            ]
            for work in works:
                work.wait()

        return launch

    found["lanes"] = traced(both(opened[0, 8], opened[1, 4]))
    found["family"] = traced(both(opened[0, 2], opened[0, 8]))
    begin = time.perf_counter()
    lanes.close()
    found["closed_s"] = time.perf_counter() - begin
    return found


def overlap_us(kernels: list[dict[str, Any]]) -> float:
    first, second = kernels
    return min(first["end"], second["end"]) - max(first["begin"], second["begin"])


def test_lanes_sum_take_their_ctas_and_overlap_where_a_family_does_not(
    gpu_ranks: Any,
) -> None:
    for found in gpu_ranks(rank_sums_and_traces, 2):
        assert all(found["sums"].values())
        for (_, resource), ctas in found["ctas"].items():
            assert ctas == [resource]
        assert len(found["lanes"]) == len(found["family"]) == 2
        assert overlap_us(found["lanes"]) > 0
        assert overlap_us(found["family"]) <= 0
        assert found["closed_s"] < 20


def rank_aborts(rank: int, size: int) -> float:
    lanes = pool(2)
    lane = lanes.lane(0, 2)
    message = torch.ones(1000, device=DEVICE)
    lane.allreduce([message]).wait()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(15)  # takes no part
        return 0.0
    lane.allreduce([message])
    time.sleep(0.5)
    begin = time.perf_counter()
    lanes.abort()
    torch.cuda.synchronize()  # the kernel that waited has ended
    return time.perf_counter() - begin


def test_an_abort_ends_a_kernel_that_waits_for_a_peer(gpu_ranks: Any) -> None:
    waited_s, _ = gpu_ranks(rank_aborts, 2)
    assert waited_s < 12


def rank_probes(rank: int, size: int) -> list[int]:
    samples = probe_network(lanes=(1, 4), budget_s=8.0)
    return sorted({one.lanes for one in samples.contention})


def test_contention_is_measured_beside_several_lanes(gpu_ranks: Any) -> None:
    """Kernels that several threads launch may wait for each other forever."""
    first, second = gpu_ranks(rank_probes, 2, timeout_s=60)
    assert first == second
    assert 1 in first
