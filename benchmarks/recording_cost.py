"""Measure the cost of recording per step, and its cost when it is off.

Two ranks, Gloo on loopback, the same plan three times, step by step in turn: never
recorded, recorded by a `Recorder`, and recorded before but no longer. The result is the
median of paired ratios of rank 0.

``--steps 20`` is the short form.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

from _ranks import run
from _record import spread, store
from equal_buckets import ddp_buckets, make, plan_of
from stretto.runtime import DistributedDataParallel, Recorder

WARMUP = 6
SHAPE = (24, 256)


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    groups = ddp_buckets(make(*SHAPE), 0.5)
    x = torch.randn(256, SHAPE[1])
    models: dict[str, DistributedDataParallel] = {}
    for name in ("never", "never again", "recorded", "no longer"):
        model = make(*SHAPE)
        plan = plan_of(model, groups, size, lanes=2, slices=2)
        models[name] = DistributedDataParallel(model, plan=plan)
    models["recorded"].observe(Recorder())
    models["no longer"].observe(Recorder())
    step(models["no longer"], x)
    models["no longer"].observe(None)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.steps + WARMUP):
        names = list(models) if turn % 2 else list(models)[::-1]
        for name in names:
            dist.barrier()
            begin_s = time.perf_counter()
            step(models[name], x)
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
    if rank == 0:
        store(
            options.name,
            {
                "what": "step time over a model's that was never recorded, 2 ranks",
                "reach": "no longer recorded: 1.00 within the spread of never again",
                "buckets": len(groups),
                "step_s": spread(seconds["never"]),
                "ratio": {
                    name: spread(
                        [a / b for a, b in zip(values, seconds["never"], strict=True)]
                    )
                    for name, values in seconds.items()
                },
            },
        )


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--name", default="recording_cost", help="of the result")
    run(bench, 2, parser.parse_args())


if __name__ == "__main__":
    main()
