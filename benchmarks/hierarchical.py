"""Measure all-reduces in two levels against rings, and a model's step, in the lab.

    stretto lab run --hosts 2 --ranks-per-host 2 --link 1gbit -- \
        python benchmarks/hierarchical.py

Two hosts of two ranks. In one run, in turn: an all-reduce on a Gloo lane over all ranks
and on a hierarchical lane, for several sizes; then steps of the demo's network with the
same plan on both kinds of lanes, and with DDP, each behind a barrier; then steps of an
emulated model, whose computation is waiting, with the best plan of rings alone and the
best that chooses ring or two levels for each bucket. The results are medians of paired
ratios, of rank 0. ``--name`` is the result file's.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _plans import equal_buckets
from _record import spread, store
from stretto.demo.tasks import ConvNet
from stretto.measure.emulated import EmulatedModel
from stretto.runtime import DistributedDataParallel
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of
from stretto.schema import Cluster, Link, TensorSpec, Workload

LANES = ("gloo", "hierarchical")
WARMUP = 3
LINK_BYTES_PER_S = 125e6
FORWARD_S, BACKWARD_S = 0.05, 0.1


def reduces(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and ratios of single all-reduces."""
    world = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    pools = {
        name: LanePool(
            ranks_of(world, timeout_s=60.0),
            serial=f"bench/{name}",
            backend=name,
            device=torch.device("cpu"),
        )
        for name in LANES
    }
    found = {}
    for size_bytes in options.sizes:
        seconds: dict[str, list[float]] = {name: [] for name in LANES}
        values = torch.ones(size_bytes // 4)
        for turn in range(options.repeats + WARMUP):
            for name in LANES if turn % 2 else LANES[::-1]:
                lane = pools[name].lane(0)
                dist.barrier()
                begin_s = time.perf_counter()
                lane.allreduce([values.zero_()]).wait()
                if turn >= WARMUP:
                    seconds[name].append(time.perf_counter() - begin_s)
        ratios = [
            a / b for a, b in zip(seconds["gloo"], seconds["hierarchical"], strict=True)
        ]
        found[str(size_bytes)] = {
            "seconds": {name: spread(row) for name, row in seconds.items()},
            "times_faster": spread(ratios),
        }
    for pool in pools.values():
        pool.close()
    return found


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and ratios of the demo network's steps."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return ConvNet()

    plan = equal_buckets(made(), options.bucket_bytes, dist.get_world_size(), 2)
    models: dict[str, Any] = {
        "ddp": nn.parallel.DistributedDataParallel(made()),
        **{
            name: DistributedDataParallel(made(), plan=plan, lane_backend=name)
            for name in LANES
        },
    }
    torch.manual_seed(dist.get_rank())
    x, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.steps + WARMUP):
        for name in list(models) if turn % 2 else list(models)[::-1]:
            model = models[name]
            model.zero_grad()
            dist.barrier()
            begin_s = time.perf_counter()
            nn.functional.cross_entropy(model(x), labels).backward()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
    for name, model in models.items():
        for mine, its in zip(
            model.parameters(), models["ddp"].parameters(), strict=True
        ):
            torch.testing.assert_close(mine.grad, its.grad, msg=f"{name} differs")
    base = seconds["hierarchical"]
    return {
        "gradient_bytes": sum(4 * p.numel() for p in models["ddp"].parameters()),
        "seconds": {name: spread(row) for name, row in seconds.items()},
        "times_faster_than": {
            name: spread([a / b for a, b in zip(seconds[name], base, strict=True)])
            for name in ("ddp", "gloo")
        },
    }


def cluster_of(reduced: dict[str, Any]) -> Cluster:
    """Return the lab's cluster, as measured by the all-reduces alone.

    The small message gives the latencies: six in a ring, and in two levels two across
    hosts and two within. What the large one takes in two levels beyond its time on the
    link is the rate within a host.
    """
    sizes = sorted(map(int, reduced))
    small, large = (reduced[str(size)]["seconds"] for size in (sizes[0], sizes[-1]))
    between = Link(
        latency_s=small["gloo"]["median"] / 6, bandwidth_bytes_per_s=LINK_BYTES_PER_S
    )
    two_levels_s = [row["hierarchical"]["median"] for row in (small, large)]
    within_s = two_levels_s[1] - two_levels_s[0] - sizes[-1] / LINK_BYTES_PER_S
    return Cluster(
        name="lab",
        hosts=2,
        ranks_per_host=2,
        inter_host=between,
        intra_host=Link(
            latency_s=max(0.0, two_levels_s[0] / 2 - between.latency_s),
            bandwidth_bytes_per_s=sizes[-1] / max(1e-3, within_s),
        ),
    )


def blocks() -> Workload:
    """Return a transformer's layers: large matrices, small vectors, a table."""
    sizes = [("head", 64_000)]
    for block in reversed(range(12)):
        sizes += [(f"block{block}.out", 1_000_000), (f"block{block}.in", 1_000_000)]
        sizes += [(f"block{block}.norm", 4_000)]
    sizes += [("table", 6_000_000)]
    total, gone, tensors = sum(size for _, size in sizes), 0, []
    for name, size in sizes:
        gone += size
        ready_s = 0.999 * BACKWARD_S * gone / total
        tensors.append(
            TensorSpec(
                name=f"{name}.weight",
                bytes=size,
                dtype="float32",
                ready_s=ready_s,
                needed_s=FORWARD_S * (1 - gone / total),
            )
        )
    return Workload(
        name="blocks",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        tensors=tuple(tensors),
    )


def plans(options: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Return seconds and ratios of an emulated model's steps by kind of plan."""
    workload = blocks()
    # One flow fills the link, so that a lane is enough.
    made = [
        {
            name: stretto.plan(
                workload, cluster, "joint", algorithms=given, max_lanes=1
            )
            for name, given in {"rings": "ring", "chosen": "ring,hierarchical"}.items()
        }
    ]
    dist.broadcast_object_list(made)  # each rank measured a cluster of its own
    names = {**made[0], "two levels": made[0]["rings"]}
    models: dict[str, Any] = {
        "ddp": nn.parallel.DistributedDataParallel(
            EmulatedModel(workload), gradient_as_bucket_view=True
        )
    }
    for name, plan in names.items():
        models[name] = DistributedDataParallel(
            EmulatedModel(workload),
            plan=plan,
            lane_backend="hierarchical" if name == "two levels" else None,
            gradient_as_bucket_view=True,
        )
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.steps + WARMUP):
        for name in list(models) if turn % 2 else list(models)[::-1]:
            model = models[name]
            dist.barrier()
            begin_s = time.perf_counter()
            model().backward()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
    base = seconds["chosen"]
    return {
        "gradient_bytes": sum(t.bytes for t in workload.tensors),
        "algorithms": Counter(b.algorithm for b in names["chosen"].buckets),
        "predicted_s": {
            name: plan.predicted.iteration_s for name, plan in made[0].items()
        },
        "seconds": {name: spread(row) for name, row in seconds.items()},
        "times_faster_than": {
            name: spread([a / b for a, b in zip(seconds[name], base, strict=True)])
            for name in models
            if name != "chosen"
        },
    }


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="hierarchical")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2**16, 2**20, 2**24])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bucket-bytes", type=int, default=2**22)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        "what": "all-reduce in two levels against a ring, 2 hosts of 2 ranks",
        "reach": {
            "all_reduce.16777216.times_faster": "at least 1.3",
            "step.times_faster_than.gloo": "at least 1.15",
            "emulated.times_faster_than.rings": "at least 1.15",
        },
        "all_reduce": (reduced := reduces(options)),
        "step": steps(options),
        "emulated": plans(options, cluster_of(reduced)),
    }
    if dist.get_rank() == 0:
        store(options.name, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
