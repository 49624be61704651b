"""Compare overlap with the next forward with overlap with backward alone.

Run it on four emulated hosts:

    stretto lab run --hosts 4 --link 1gbit -- python benchmarks/forward_overlap.py
    stretto lab run --hosts 4 --link 1gbit --flow 300mbit -- \\
        python benchmarks/forward_overlap.py --name capped

Computation is emulated: layers sleep, as on a device of their own. One process trains
with PyTorch's DDP, with the best backward plan, with the forward plan's buckets during
backward, and with the forward plan, in blocks of steps in turns. A block's figure is
the mean period between the starts of forward, of the slowest rank. Results are medians
of blocks, and ratios are medians of those of neighboring blocks.

``--host`` measures instead what overlapping adds to a step on the host, as processor
time of the training thread, for a model of many small parameters on two local ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _ranks import run
from _record import spread, store
from stretto.planners.joint import RUNNABLE_DIMS, JointPlanner
from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan, TensorSpec, Workload
from stretto.testing import EmulatedModel

LINK_BYTES_PER_S = 125e6
LAYERS = 24
MODEL_BYTES = 21_000_000
CASES = {"balanced": 1.0, "communication-bound": 0.5, "compute-bound": 2.0}
"""Computation as a multiple of the time that communication takes on the link alone."""


def workload_of(ratio: float, ranks: int) -> Workload:
    """Return layers of equal sizes and times, forward to backward as 1 to 2."""
    wire_s = 2 * (ranks - 1) / ranks * MODEL_BYTES / LINK_BYTES_PER_S
    forward_s, backward_s = ratio * wire_s / 3, ratio * wire_s * 2 / 3
    each = MODEL_BYTES // LAYERS // 4 * 4
    return Workload(
        name="layers",
        framework="torch",
        device="cpu",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=f"layer{LAYERS - 1 - i}.weight",
                bytes=each,
                dtype="float32",
                ready_s=backward_s * (i + 1) / LAYERS,
                needed_s=forward_s * (LAYERS - 1 - i) / LAYERS,
            )
            for i in range(LAYERS)
        ),
    )


def shared(value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def block_s(model: nn.Module, optimizer: Any, steps: int) -> float:
    """Return the period of a steady run, of the slowest rank."""
    dist.barrier()
    starts_s = []
    for _ in range(steps + 2):
        starts_s.append(time.perf_counter())
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():  # what is under way ends here
        parameter.detach()
    period = torch.tensor((starts_s[-1] - starts_s[1]) / steps)
    dist.all_reduce(period, op=dist.ReduceOp.MAX)
    return float(period)


def compare(case: str, cluster: Any, options: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    workload = workload_of(CASES[case], ranks)
    found: list[Plan] = []
    if dist.get_rank() == 0:
        found += [
            JointPlanner(dims=dims).plan(workload, cluster)
            for dims in (RUNNABLE_DIMS, (*RUNNABLE_DIMS, "forward"))
        ]
    backward, forward = shared(found)
    say(f"{case}: planned")
    plans = {
        "backward": backward,
        "forward's buckets": replace(
            forward, overlap="backward", launch=(), predicted=None
        ),
        "forward": forward,
    }
    models: dict[str, nn.Module] = {
        "ddp": nn.parallel.DistributedDataParallel(EmulatedModel(workload))
    }
    for name, plan in plans.items():
        models[name] = DistributedDataParallel(
            EmulatedModel(workload), plan=plan, gradient_as_bucket_view=True
        )
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1e-6)
        for name, model in models.items()
    }
    for name, model in models.items():
        block_s(model, optimizers[name], 2)
    rows: dict[str, list[float]] = {name: [] for name in models}
    for number in range(options.blocks):
        names = list(models) if number % 2 else list(models)[::-1]
        for name in names:
            rows[name].append(block_s(models[name], optimizers[name], options.steps))
        say(" ".join(f"{name} {values[-1]:.4f}" for name, values in rows.items()))
    bound_s = backward.predicted.lower_bound_s if backward.predicted else 0.0

    def ratio(one: str, other: str) -> dict[str, Any]:
        pairs = zip(rows[one], rows[other], strict=True)
        return spread([a / b for a, b in pairs])

    return {
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
        "overlap": forward.overlap,
        "buckets": {name: len(plan.buckets) for name, plan in plans.items()},
        "lanes": {name: plan.lanes for name, plan in plans.items()},
        "period_s": {name: spread(values) for name, values in rows.items()},
        "min_s": {name: min(values) for name, values in rows.items()},
        "predicted_s": {
            name: plan.predicted.iteration_s
            for name, plan in plans.items()
            if plan.predicted
        },
        "backward_bound_s": bound_s,
        "forward_bound_s": forward.predicted and forward.predicted.lower_bound_s,
        "forward over backward bound": statistics.median(rows["forward"]) / bound_s,
        "forward over backward": ratio("forward", "backward"),
        "forward over its buckets": ratio("forward", "forward's buckets"),
        "forward over ddp": ratio("forward", "ddp"),
    }


def in_lab(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = stretto.probe(budget_s=options.probe_s)
    say("probed")
    found = {case: compare(case, cluster, options) for case in options.cases}
    if dist.get_rank() == 0:
        link, rates = cluster.inter_host, cluster.concurrency
        store(
            f"forward_overlap_{options.name}",
            {
                "link": repr(link),
                "concurrency": repr(rates),
                "model_bytes": MODEL_BYTES,
                "cases": found,
            },
        )
    dist.barrier()
    dist.destroy_process_group()


# What it costs on the host.


class Small(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def host(rank: int, size: int, options: argparse.Namespace) -> None:
    names = [n for n, _ in Small(options.layers).named_parameters()][::-1]
    share = len(names) // 12
    plan = Plan(
        planner="benchmark",
        workload_digest="",
        ranks=size,
        overlap="backward",
        lanes=1,
        buckets=tuple(
            Bucket(tensors=tuple(names[i : i + share]), wire_dtype="float32")
            for i in range(0, len(names), share)
        ),
    )
    kinds: dict[str, Any] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-6),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-6),
    }
    found = {}
    for kind, optimizer_of in kinds.items():
        runs = {}
        for overlap in ("backward", "forward"):
            model = DistributedDataParallel(
                Small(options.layers), plan=replace(plan, overlap=overlap)
            )
            runs[overlap] = (model, optimizer_of(model.parameters()))
        rows: dict[str, list[float]] = {overlap: [] for overlap in runs}
        x = torch.ones(1, 16)
        for step in range(options.steps + 4):
            for overlap, (model, optimizer) in runs.items():
                begin_s = time.thread_time()
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= 4:
                    rows[overlap].append(time.thread_time() - begin_s)
                pending = getattr(model, "_planned").overlap  # noqa: B009
                if pending is not None and step == 1:
                    # Small buckets arrive at once; here none may seem to.
                    setattr(pending, "_arrived", list)  # noqa: B010
        added = [f - b for f, b in zip(rows["forward"], rows["backward"], strict=True)]
        found[kind] = {
            "step_s": {name: spread(values) for name, values in rows.items()},
            "added_us_per_parameter": spread([1e6 * v / len(names) for v in added]),
        }
    if rank == 0:
        store("forward_overlap_host", {"parameters": len(names), **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="uncapped", help="of the result file")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="in a block")
    parser.add_argument("--probe-s", type=float, default=6.0)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--layers", type=int, default=150, help="with --host")
    options = parser.parse_args()
    if options.host:
        options.steps = max(options.steps, 60)
        run(host, 2, options)
    else:
        in_lab(options)


if __name__ == "__main__":
    Path(__file__).parent.joinpath("results").mkdir(exist_ok=True)
    main()
