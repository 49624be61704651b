"""Measure the cost of looking for NaN and infinity.

The figure is step time with ``nan="warn"`` over off. Two ranks, Gloo on loopback, the
same model and plan: off, off again, warn, and warn with gradients as views of the
buckets (against off with the same), step by step in turn, paired, medians. The model is
`equal_buckets`'s, whose computation is small relative to its gradients: a harder case
than most.

``--steps 20`` is the short form.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _ranks import run
from _record import spread, store
from equal_buckets import ddp_buckets, make, plan_of
from stretto.runtime import DistributedDataParallel

WARMUP = 6


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    shape = (options.layers, options.width)
    groups = ddp_buckets(make(*shape), options.cap)

    def build(**how: Any) -> nn.Module:
        model = make(*shape)
        return DistributedDataParallel(model, plan=plan_of(model, groups, size), **how)

    models = {
        "off": build(),
        "off again": build(),
        "warn": build(nan="warn"),
        "views, off": build(gradient_as_bucket_view=True),
        "views, warn": build(nan="warn", gradient_as_bucket_view=True),
    }
    base = {"views, warn": "views, off"}
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1e-3)
        for name, model in models.items()
    }
    x = torch.randn(options.batch, options.width)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(options.steps + WARMUP):
        for name in list(models) if step % 2 else list(models)[::-1]:
            model, optimizer = models[name], optimizers[name]
            dist.barrier()
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
    if rank:
        return
    store(
        options.name,
        {
            "what": "step time with nan='warn' over off, 2 ranks, Gloo loopback",
            "reach": "median ratio at most 1.02",
            "buckets": len(groups),
            "gradient_bytes": sum(p.numel() * 4 for p in models["off"].parameters()),
            "off_step_s": spread(seconds["off"]),
            "ratio": {
                name: spread(
                    [
                        a / b
                        for a, b in zip(
                            values, seconds[base.get(name, "off")], strict=True
                        )
                    ]
                )
                for name, values in seconds.items()
                if name != "off"
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cap", type=float, default=0.5, help="MiB of a bucket")
    parser.add_argument("--name", default="nan_cost", help="of the result")
    run(bench, 2, parser.parse_args())


if __name__ == "__main__":
    main()
