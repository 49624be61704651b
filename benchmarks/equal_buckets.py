"""Compare stretto's runtime with DDP on the same buckets: step time and memory.

Two ranks, Gloo on loopback, one lane. In one run, step by step in turn: DDP, DDP again
(the noise between equal variants) and a plan of DDP's own buckets; beside them, not
part of the figure, the same buckets in two slices on two lanes. The result is the
median of paired ratios, of rank 0; each step starts behind a barrier.

``--steps 20`` is the short form.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _ranks import run
from _record import spread, store
from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan, tensors_digest

TorchDDP = nn.parallel.DistributedDataParallel
WARMUP = 6


class Tower(nn.Module):
    """Many layers of one size, which allow any number of buckets."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def ddp_buckets(model: nn.Module, cap_mib: float) -> list[list[str]]:
    """Return names per bucket as DDP rebuilds them, in order of readiness."""
    buckets: list[list[str]] = []
    size_bytes = float("inf")
    for name, parameter in reversed(list(model.named_parameters())):
        if size_bytes >= cap_mib * 2**20:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(name)
        size_bytes += parameter.numel() * parameter.element_size()
    return buckets


def plan_of(model: nn.Module, groups: list[list[str]], ranks: int, **how: Any) -> Plan:
    rows = [
        (n, p.numel() * p.element_size(), "float32")
        for n, p in model.named_parameters()
    ]
    how = {"lanes": 1, "slices": 1, "wire_dtype": "float32"} | how
    return Plan(
        planner="benchmark",
        workload_digest=tensors_digest(rows),
        ranks=ranks,
        overlap="backward",
        lanes=how["lanes"],
        buckets=tuple(
            Bucket(
                tensors=tuple(names),
                lane=i % how["lanes"],
                slices=how["slices"],
                wire_dtype=how["wire_dtype"],
            )
            for i, names in enumerate(groups)
        ),
    )


def make(layers: int, width: int) -> Tower:
    torch.manual_seed(0)
    return Tower(layers, width)


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    groups = ddp_buckets(make(options.layers, options.width), options.cap)
    shape = (options.layers, options.width)

    def ours(**how: Any) -> nn.Module:
        model = make(*shape)
        plan = plan_of(model, groups, size, **how)
        return DistributedDataParallel(model, plan=plan)

    def stock() -> nn.Module:
        return TorchDDP(make(*shape), bucket_cap_mb_list=[options.cap])

    memory = {}
    models: dict[str, nn.Module] = {}
    for name, build in {
        "ddp": stock,
        "ddp again": stock,
        "stretto": ours,
        "two lanes, two slices": lambda: ours(lanes=2, slices=2),
    }.items():
        before = _resident_bytes()
        models[name] = build()
        _step(models[name], torch.randn(options.batch, options.width))
        _step(models[name], torch.randn(options.batch, options.width))
        memory[name] = _resident_bytes() - before
    x = torch.randn(options.batch, options.width)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    cpu: dict[str, list[float]] = {name: [] for name in models}
    for step in range(options.steps + WARMUP):
        names = list(models) if step % 2 else list(models)[::-1]
        for name in names:
            dist.barrier()
            begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
            _step(models[name], x)
            if step >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
                cpu[name].append(_cpu_s() - begin_cpu_s)
    if rank:
        return
    _check_equal(models, groups)
    store(
        options.name,
        {
            "what": "step time over DDP's with equal buckets, 2 ranks, Gloo loopback",
            "reach": "stretto's median ratio at most 1.01",
            "buckets": len(groups),
            "gradient_bytes": sum(p.numel() * 4 for p in models["ddp"].parameters()),
            "largest_bucket_bytes": max(
                sum(
                    dict(models["ddp"].module.named_parameters())[n].numel() * 4
                    for n in names
                )
                for names in groups
            ),
            "ddp_step_s": spread(seconds["ddp"]),
            "ratio": {
                name: spread(
                    [a / b for a, b in zip(values, seconds["ddp"], strict=True)]
                )
                for name, values in seconds.items()
            },
            "cpu_ratio": {
                name: spread([a / b for a, b in zip(values, cpu["ddp"], strict=True)])
                for name, values in cpu.items()
            },
            "resident_bytes_grown": memory,
        },
    )


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _check_equal(models: dict[str, nn.Module], groups: list[list[str]]) -> None:
    """Require DDP's buckets and gradients; otherwise the comparison is invalid."""
    rebuilt = models["ddp"]._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # noqa: SLF001
    if len(rebuilt.split(",")) != len(groups):
        raise SystemExit(f"DDP built {rebuilt}, the plan has {len(groups)} buckets")
    want = [p.grad for p in models["ddp"].parameters()]
    for model in models.values():
        for parameter, gradient in zip(model.parameters(), want, strict=True):
            if not torch.equal(parameter.grad, gradient):
                raise SystemExit("gradients differ from DDP's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cap", type=float, default=0.5, help="MiB of a bucket")
    parser.add_argument("--name", default="equal_buckets", help="of the result")
    run(bench, 2, parser.parse_args())


if __name__ == "__main__":
    main()
