"""Measure the CPU use of a rank that waits a second for its peer inside backward.

Two ranks, Gloo on loopback. In every other step rank 1 is a second late, and rank 0
waits for it in backward. The CPU time of rank 0's process in such a step, less that in
a step without a wait, over the time waited is its share of a core. Variants take turns
step by step: DDP, a plan on one lane, on four lanes in slices, a narrower type on the
wire, and the negotiated order.

``--waits 3`` is the short form.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from _ranks import run
from _record import spread, store
from equal_buckets import Tower, ddp_buckets, plan_of
from stretto.runtime import DistributedDataParallel

LATE_S = 1.0
WARMUP = 4
REACH = 0.03


class Late(nn.Module):
    """A model whose backward is late on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower(6, 128)
        self.late_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.tower(x)
        out.register_hook(lambda _: time.sleep(self.late_s))
        return out


def models_of(size: int) -> dict[str, nn.Module]:
    groups = ddp_buckets(Late(), 0.1)

    def planned(**how: object) -> nn.Module:
        model = Late()
        plan = plan_of(model, groups, size, **how)
        return DistributedDataParallel(model, plan=plan)

    return {
        "ddp": nn.parallel.DistributedDataParallel(Late(), bucket_cap_mb=0.1),
        "one lane": planned(),
        "four lanes, four slices": planned(lanes=4, slices=4),
        "four lanes, float16 on the wire": planned(lanes=4, wire_dtype="float16"),
        "negotiated order": DistributedDataParallel(Late(), order="negotiated"),
    }


def step(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return seconds and CPU seconds of the whole process in one step."""
    dist.barrier()
    model.zero_grad()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    model(x).square().mean().backward()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    models = models_of(size)
    x = torch.randn(16, 128)
    quick: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    waited: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(WARMUP):
            step(model, x)
    for _ in range(options.waits):
        for name, model in models.items():
            quick[name].append(step(model, x))
            model.module.late_s = LATE_S if rank == 1 else 0.0
            waited[name].append(step(model, x))
            model.module.late_s = 0.0
    if rank:
        return
    shares = {}
    for name in models:
        base_s, base_cpu_s = (
            statistics.median(v) for v in zip(*quick[name], strict=True)
        )
        shares[name] = spread(
            [
                max(0.0, cpu_s - base_cpu_s) / (wall_s - base_s)
                for wall_s, cpu_s in waited[name]
            ]
        )
    store(
        options.name,
        {
            "what": "CPU of a rank that waits 1 s for its peer, share of a core",
            "reach": f"under {REACH:.0%} of a core, median",
            "share_of_a_core": shares,
            "waited_s": {
                name: spread([wall_s for wall_s, _ in rows])
                for name, rows in waited.items()
            },
            "met": all(
                row["median"] < REACH for name, row in shares.items() if name != "ddp"
            ),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waits", type=int, default=12)
    parser.add_argument("--name", default="waiting_cpu", help="of the result")
    run(bench, 2, parser.parse_args())


if __name__ == "__main__":
    main()
