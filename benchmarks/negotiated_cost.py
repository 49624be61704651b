"""Measure the negotiated engine's cost over planned buckets, and the cost of waiting.

Four ranks, Gloo on loopback. In one run, step by step in turn: a plan of equal buckets,
the same again (the noise between equal variants), a negotiated order with the same
lanes and units, and DDP. The result is the median of paired ratios, of rank 0; each
step starts behind a barrier. Then the time of one small all-reduce from submit to
result, beside the same on a bare Gloo group, and the processor time of ranks that wait
a second for another one.

``--steps 10 --width 64`` is the short form.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _plans import equal_buckets
from _ranks import run
from _record import spread, store
from stretto.runtime import DistributedDataParallel
from stretto.runtime.negotiated import CollectiveKind, Engine, EngineOptions, Request

TorchDDP = nn.parallel.DistributedDataParallel
WARMUP = 6
LANES = 2


class Tower(nn.Module):
    """Layers with a weight and a bias each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    costs = step_costs(rank, size, options)
    latency = small_latency(options)
    waiting = waiting_cpu(rank)
    if rank:
        return
    reach = {
        "ratio.negotiated": "at most 1.03",
        "small_s.negotiated": "at most 0.003",
        "waiting_cpu_share": "at most 0.03",
    }
    store(
        options.name,
        {
            "what": "negotiated engine: step over planned buckets, latency, waiting",
            "ranks": size,
            "reach": reach,
            **costs,
            **latency,
            "waiting_cpu_share": waiting,
        },
    )


def step_costs(rank: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    def make() -> Tower:
        torch.manual_seed(0)
        return Tower(options.layers, options.width)

    plan = equal_buckets(make(), options.unit_bytes, size, LANES)
    how = {"order": "negotiated", "lanes": LANES, "unit_bytes": options.unit_bytes}
    models: dict[str, Any] = {
        "planned": DistributedDataParallel(make(), plan=plan),
        "planned again": DistributedDataParallel(make(), plan=plan),
        "negotiated": DistributedDataParallel(make(), **how),
        "ddp": TorchDDP(make(), bucket_cap_mb=options.unit_bytes / 2**20),
    }
    torch.manual_seed(rank)
    x = torch.randn(options.batch, options.width)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    cpu: dict[str, list[float]] = {name: [] for name in models}
    for step in range(options.steps + WARMUP):
        names = list(models) if step % 2 else list(models)[::-1]
        for name in names:
            model = models[name]
            model.zero_grad()
            dist.barrier()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            model(x).square().mean().backward()
            if step >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
                cpu[name].append(time.process_time() - begin_cpu_s)
    for name, model in models.items():
        for mine, its in zip(
            model.parameters(), models["ddp"].parameters(), strict=True
        ):
            torch.testing.assert_close(mine.grad, its.grad, msg=f"{name} differs")
    base = seconds["planned"]
    return {
        "tensors": 2 * options.layers,
        "gradient_bytes": sum(p.numel() * 4 for p in models["ddp"].parameters()),
        "unit_bytes": options.unit_bytes,
        "lanes": LANES,
        "order_kept": models["negotiated"]._negotiated.in_stable_order,  # noqa: SLF001
        "planned_step_s": spread(base),
        "ratio": {
            name: spread([a / b for a, b in zip(values, base, strict=True)])
            for name, values in seconds.items()
        },
        "cpu_s": {name: spread(values) for name, values in cpu.items()},
    }


def small_latency(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a 4 KiB all-reduce, names known."""
    engine = Engine.of_group(dist.group.WORLD, options=EngineOptions(cycle_s=0.0))
    x = torch.ones(1024)
    request = Request(
        name="x", kind=CollectiveKind.ALLREDUCE, dtype="float32", shape=(1024,)
    )
    found: dict[str, list[float]] = {"negotiated": [], "gloo": []}
    for i in range(10 * options.steps):
        dist.barrier()
        begin_s = time.perf_counter()
        engine.submit(request, x).wait()
        middle_s = time.perf_counter()
        dist.all_reduce(x.clone())
        if i >= WARMUP:
            found["negotiated"].append(middle_s - begin_s)
            found["gloo"].append(time.perf_counter() - middle_s)
    engine.close()
    return {"small_s": {name: spread(values) for name, values in found.items()}}


def waiting_cpu(rank: int) -> list[float]:
    """Return each rank's share of a core in a second in which the last rank is late."""
    size = dist.get_world_size()
    engine = Engine.of_group(dist.group.WORLD)
    x = torch.ones(1024)
    request = Request(
        name="x", kind=CollectiveKind.ALLREDUCE, dtype="float32", shape=(1024,)
    )
    engine.submit(request, x).wait()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if rank == size - 1:
        time.sleep(1.0)
    engine.submit(request, x).wait()
    share = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
    shares: list[Any] = [None] * size
    dist.all_gather_object(shares, share)
    engine.close()
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=250)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--unit-bytes", type=int, default=4 * 2**20)
    parser.add_argument("--name", default="negotiated_cost")
    arguments = parser.parse_args()
    run(bench, arguments.ranks, arguments, timeout_s=900)
