"""A VGG on four hosts: burst parallel against data parallel, predicted and measured.

    stretto lab run --hosts 4 --link 1gbit -- python benchmarks/burst_run.py

On rank 0 the model's layers are profiled while the other ranks wait; the network is
probed; a plan is made. Then plain DDP, ours with a plan of its own and the burst plan
train replicas with the same global batch, a few steps of each in turn. Reach: burst at
least 1.3 times faster, its step and idle time predicted within 10 %.
"""

from __future__ import annotations

import argparse
import copy
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _record import spread, store
from stretto._api import burst
from stretto.burst.executor import BUCKET_BYTES
from stretto.testing.models import VGG


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = VGG(
        options.depth,
        width=options.width,
        dense=options.dense,
        image=32,
        classes=10,
        dropout=0.0,
    )
    share = options.batch // ranks
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(share, 3, 32, 32, generator=draw)
    y = torch.randint(0, 10, (share,), generator=draw)
    cluster = stretto.probe(name="lab", budget_s=options.probe_s)
    plan, predicted = planned(options, model, cluster, ranks)
    variants = {
        "ddp": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "stretto": stretto.DistributedDataParallel(copy.deepcopy(model), plan="auto"),
        "burst": stretto.BurstParallel(
            copy.deepcopy(model), plan, example_inputs=(x[:2],)
        ),
    }
    trained = {
        name: (each, torch.optim.SGD(each.parameters(), lr=0.01))
        for name, each in variants.items()
    }

    def steps(name: str, count: int) -> float:
        each, optimizer = trained[name]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(x), y).backward()
            optimizer.step()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took) / count

    for name in variants:
        steps(name, options.warmup if name == "stretto" else 3)
    variants["burst"].measure(options.rounds * options.block)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds):
        order = list(variants) if number % 2 else list(variants)[::-1]
        for name in order:
            seconds[name].append(steps(name, options.block))
    idle = [None] * ranks
    dist.all_gather_object(idle, variants["burst"].waiting())
    if rank == 0:
        report(options, plan, predicted, seconds, idle, cluster)
    dist.barrier()
    dist.destroy_process_group()


def planned(options, model, cluster, ranks):
    """The plan and its predicted step, made on rank 0 while the others wait."""
    found = [None, None]
    if dist.get_rank() == 0:
        profile = burst.profile(
            copy.deepcopy(model),
            (torch.randn(2, 3, 32, 32),),
            batch=options.batch,
            gpus=ranks,
            loss=lambda out: nn.functional.cross_entropy(
                out, torch.zeros(len(out), dtype=torch.int64)
            ),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            least_layer_s=options.least_layer_s,
            # On a busy machine a profile's rounds differ.
            max_spread_ratio=options.max_spread,
        )
        problem = burst.problem(
            profile, gpus=ranks, batch=options.batch, cluster=cluster
        )
        # The ranks are processes on one machine, whose cores they share.
        cores = float(len(os.sched_getaffinity(0)))
        plan, step = burst.plan_on(
            problem, cluster, bucket_bytes=BUCKET_BYTES, cores=cores
        )
        found = [plan, {"iteration_s": step.iteration_s, "idle_s": step.idle_s}]
    dist.broadcast_object_list(found)
    # Layers that were too small to time are joined in the profile: the plan says which.
    return found[0], found[1]


def report(options, plan, predicted, seconds, idle, cluster) -> None:
    medians = {name: spread(times)["median"] for name, times in seconds.items()}
    paired = {
        name: spread([a / b for a, b in zip(times, seconds["burst"], strict=True)])
        for name, times in seconds.items()
        if name != "burst"
    }
    waited = [each["total"] for each in idle]
    store(
        "burst_run" if not options.short else "burst_run_short",
        {
            "what": f"VGG-{options.depth}, width {options.width}, dense "
            f"{options.dense}, batch {options.batch} over {len(idle)} hosts",
            "reach": "data parallel over burst at least 1.3; predicted within 10 %",
            "layers": {e.layer: [e.first_gpu, e.gpus] for e in plan.layers},
            "step_s": {name: spread(times) for name, times in seconds.items()},
            "over_burst": paired,
            "predicted": {
                "burst_s": predicted["iteration_s"],
                "over_measured": predicted["iteration_s"] / medians["burst"],
                "data_parallel_s": plan.predicted.data_parallel_s,
                "data_parallel_over_ddp": plan.predicted.data_parallel_s
                / medians["ddp"],
            },
            "idle_s_by_rank": {
                "predicted": list(predicted["idle_s"]),
                "measured": waited,
                "sum_over_measured": sum(predicted["idle_s"]) / sum(waited),
                "measured_by_kind": idle,
            },
            "link_bytes_per_s": cluster.inter_host.bandwidth_bytes_per_s,
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=11)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dense", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=3, help="steps of one in a row")
    parser.add_argument("--warmup", type=int, default=60, help="of the tuned one")
    parser.add_argument("--probe-s", type=float, default=30.0)
    parser.add_argument("--least-layer-s", type=float, default=50e-6)
    parser.add_argument("--max-spread", type=float, default=0.35)
    parser.add_argument("--short", action="store_true", help="to see that it runs")
    found = parser.parse_args()
    if found.short:
        found.rounds, found.warmup, found.probe_s = 4, 30, 15.0
        found.max_spread = 10.0
    return found


if __name__ == "__main__":
    main()
