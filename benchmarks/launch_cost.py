"""Measure the host time that stretto adds per bucket on the launching thread.

Two ranks, Gloo on loopback, many small buckets of one tensor each. The figure is the
CPU time of the launching thread in ``backward()`` with stretto's runtime, less that
with DDP and the same buckets, by number of buckets: in turn, paired, medians. Waiting
is not CPU time and does not count. The benchmark also reports the CPU time of the whole
process per bucket, to which stretto's other threads would add, and the wall time within
stretto's all-reduce, including Gloo's own launch.

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
from equal_buckets import plan_of
from stretto.runtime import DistributedDataParallel

WARMUP = 6


class Chain(nn.Module):
    """One parameter after another, each of ``elements``."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(elements) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def bench(rank: int, size: int, options: argparse.Namespace) -> None:
    tensors, elements = options.buckets, options.elements

    def ours(**how: Any) -> nn.Module:
        model = Chain(tensors, elements)
        groups = [[name] for name, _ in model.named_parameters()][::-1]
        return DistributedDataParallel(model, plan=plan_of(model, groups, size, **how))

    cap_mib = elements * 4 / 2**20
    models = {
        "ddp": nn.parallel.DistributedDataParallel(
            Chain(tensors, elements), bucket_cap_mb_list=[cap_mib]
        ),
        "ddp again": nn.parallel.DistributedDataParallel(
            Chain(tensors, elements), bucket_cap_mb_list=[cap_mib]
        ),
        "stretto": ours(),
        "four lanes": ours(lanes=4),
        "four slices on four lanes": ours(lanes=4, slices=4),
    }
    walls_s: dict[str, list[float]] = {}
    for name, model in models.items():
        if name.startswith("ddp"):
            continue
        walls_s[name] = []
        _time_launches(model, walls_s[name])
    x = torch.randn(elements)
    thread: dict[str, list[float]] = {name: [] for name in models}
    process: dict[str, list[float]] = {name: [] for name in models}
    for step in range(options.steps + WARMUP):
        for name in list(models) if step % 2 else list(models)[::-1]:
            model = models[name]
            model.zero_grad()
            loss = model(x).sum()
            dist.barrier()
            if step == WARMUP and name in walls_s:
                walls_s[name].clear()
            begin_s, begin_all_s = time.thread_time(), time.process_time()
            loss.backward()
            if step >= WARMUP:
                thread[name].append(time.thread_time() - begin_s)
                process[name].append(time.process_time() - begin_all_s)
    if rank:
        return

    def added_us(values: dict[str, list[float]]) -> dict[str, Any]:
        return {
            name: spread(
                [
                    (a - b) * 1e6 / tensors
                    for a, b in zip(values[name], values["ddp"], strict=True)
                ]
            )
            for name in values
            if name != "ddp"
        }

    store(
        options.name,
        {
            "what": "host time over DDP's per bucket, 2 ranks, Gloo loopback",
            "reach": "stretto's median at most 60 us on the launching thread",
            "buckets": tensors,
            "bucket_bytes": elements * 4,
            "ddp_launching_thread_us": spread(
                [t * 1e6 / tensors for t in thread["ddp"]]
            ),
            "added_launching_thread_us": added_us(thread),
            "added_process_us": added_us(process),
            "wall_of_launch_us": {
                name: spread([t * 1e6 for t in values])
                for name, values in walls_s.items()
            },
        },
    )


def _time_launches(model: nn.Module, kept_s: list[float]) -> None:
    group: Any = model._planned  # noqa: SLF001
    launch = group.allreduce

    def timed(*arguments: Any) -> Any:
        begin_s = time.perf_counter()
        work = launch(*arguments)
        kept_s.append(time.perf_counter() - begin_s)
        return work

    # The Reducer looks up the method on the instance.
    group.allreduce = timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--name", default="launch_cost", help="of the result")
    run(bench, 2, parser.parse_args())


if __name__ == "__main__":
    main()
