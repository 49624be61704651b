"""Compare clipping by parts with exact clipping, by the global norm in both.

Run it on four emulated hosts, which takes three minutes:

    stretto lab run --hosts 4 --link 1gbit -- python benchmarks/clipping.py --store

Computation is emulated: layers sleep, as on a device of their own. One process trains
with PyTorch's DDP, with the best backward plan, and with a plan that overlaps with the
next forward, whose buckets are exchanged in halves (``exact_clipping=False``), in
blocks of steps in turns. A block's figure is the mean period between the starts of
forward, of the slowest rank. Results are medians of blocks, and ratios are medians of
those of neighboring blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _record import spread, store
from forward_overlap import CASES, say, shared, workload_of
from stretto.planners.joint import RUNNABLE_DIMS, JointPlanner
from stretto.runtime import DistributedDataParallel
from stretto.testing import EmulatedModel

if TYPE_CHECKING:
    from stretto.schema import Plan

MAX_NORM = 1.0


def block(model: nn.Module, optimizer: Any, steps: int) -> tuple[float, float]:
    """Return the period of a steady run, of the slowest rank, and the last norm."""
    dist.barrier()
    starts_s = []
    for _ in range(steps + 2):
        starts_s.append(time.perf_counter())
        model().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():  # what is under way ends here
        parameter.detach()
    period = torch.tensor((starts_s[-1] - starts_s[1]) / steps)
    dist.all_reduce(period, op=dist.ReduceOp.MAX)
    return float(period), float(norm)


def compare(case: str, cluster: Any, options: argparse.Namespace) -> dict[str, Any]:
    workload = workload_of(CASES[case], dist.get_world_size())
    found: list[Plan] = []
    if dist.get_rank() == 0:
        found += [
            JointPlanner(dims=dims).plan(workload, cluster)
            for dims in (RUNNABLE_DIMS, (*RUNNABLE_DIMS, "forward"))
        ]
    backward, forward = shared(found)
    # Where backward hides everything, the planner makes no such plan: its own buckets.
    forward = replace(forward, overlap="forward", launch=(), predicted=None)
    say(f"{case}: planned")
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    models: dict[str, nn.Module] = {
        "ddp": nn.parallel.DistributedDataParallel(EmulatedModel(workload)),
        "exact": DistributedDataParallel(
            EmulatedModel(workload), plan=backward, **settings
        ),
        "parts": DistributedDataParallel(
            EmulatedModel(workload), plan=forward, exact_clipping=False, **settings
        ),
    }
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=1e-6)
        for name, model in models.items()
    }
    for name, model in models.items():
        block(model, optimizers[name], 2)
    rows: dict[str, list[float]] = {name: [] for name in models}
    differences = []
    for number in range(options.blocks):
        norms = {}
        for name in list(models) if number % 2 else list(models)[::-1]:
            period_s, norms[name] = block(models[name], optimizers[name], options.steps)
            rows[name].append(period_s)
        differences.append(abs(norms["parts"] / norms["exact"] - 1))
        say(" ".join(f"{name} {values[-1]:.4f}" for name, values in rows.items()))

    def ratio(one: str, other: str) -> dict[str, Any]:
        pairs = zip(rows[one], rows[other], strict=True)
        return spread([a / b for a, b in pairs])

    result = {
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s,
        "buckets": {"exact": len(backward.buckets), "parts": len(forward.buckets)},
        "lanes": {"exact": backward.lanes, "parts": forward.lanes},
        "period_s": {name: spread(values) for name, values in rows.items()},
        "parts over exact": ratio("parts", "exact"),
        "parts over ddp": ratio("parts", "ddp"),
        # All gradients are 1 here: tests/dist/test_clipping.py has others.
        "norm, largest relative difference": max(differences),
    }
    middle = statistics.median(
        a / b for a, b in zip(rows["parts"], rows["exact"], strict=True)
    )
    say(
        f"{case}: parts over exact {middle:.3f}, norm differs by {max(differences):.1e}"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="uncapped", help="of the result file")
    parser.add_argument("--store", action="store_true", help="keep the result")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="in a block")
    parser.add_argument("--probe-s", type=float, default=6.0)
    parser.add_argument(
        "--cases",
        nargs="*",
        default=["balanced", "communication-bound"],
        choices=list(CASES),
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = stretto.probe(budget_s=options.probe_s)
    say("probed")
    found = {case: compare(case, cluster, options) for case in options.cases}
    if dist.get_rank() == 0:
        if options.store:
            store(f"clipping_{options.name}", {"cases": found})
        else:
            print(found, file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(__file__).parent.joinpath("results").mkdir(exist_ok=True)
    main()
