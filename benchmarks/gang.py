"""Measure a gang of three ranks whose devices have windows of 5, 50 and 90 %.

Each rank's device is an emulated one without preemption, with a foreground that
computes and waits; sleep stands for device time. The same steps of 24 micro-batches are
trained by three methods, one after another in each cycle:

- ``claims``: `stretto.Gang`, where the rank with a window takes the next micro-batch.
- ``fixed``: eight micro-batches each, and a sum when all have finished.
- ``lock step``: one micro-batch each, then all ranks wait for each other; eight times.

The result has micro-batches a second, the ratios over lock step, and the largest
difference of the claims' losses from those of one process. About a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stretto
from _record import spread, store
from background import job_of, on_time
from stretto.background.pacing import Policy

WINDOWS = (0.05, 0.5, 0.9)
PERIOD_S, TASK_S = 0.2, 0.004
MICRO_BATCHES, STEPS = 24, 2
METHODS = ("claims", "fixed", "lock step")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + index)
    x, y = torch.randn(8, 16, generator=draw), torch.randn(8, 4, generator=draw)
    return (model(x) - y).square().mean()


def losses_alone(steps: int) -> list[float]:
    """Return the mean loss of each step, trained in one process."""
    model, found = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.stack(
            [loss_of(model, step, i) for i in range(MICRO_BATCHES)]
        ).sum()
        (total / MICRO_BATCHES).backward()
        found.append(total.item() / MICRO_BATCHES)
        optimizer.step()
    return found


class Rank:
    """One rank's training by one method."""

    def __init__(self, background: stretto.Background) -> None:
        self.background = background
        self.model = model_of()
        self.gang = stretto.Gang(
            self.model, micro_batches=MICRO_BATCHES, background=background
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def micro_batch(self, step: int, index: int) -> float:
        time.sleep(TASK_S)
        loss = loss_of(self.model, step, index)
        loss.backward()
        return loss.item()

    def claims(self, step: int) -> float:
        total = sum(self.micro_batch(step, index) for index in self.gang.claims())
        self.gang.reduce()
        return total

    def fixed(self, step: int, *, together: bool = False) -> float:
        total = 0.0
        self.optimizer.zero_grad()
        for index in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size()):
            with self.background.lease("micro-batch"):
                total += self.micro_batch(step, index)
            if together:
                dist.barrier()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= MICRO_BATCHES
        return total

    def train(self, method: str, steps: range) -> list[float]:
        found = []
        for step in steps:
            if method == "claims":
                total = self.claims(step)
            else:
                total = self.fixed(step, together=method == "lock step")
            self.optimizer.step()
            summed = torch.tensor([total], dtype=torch.float64)
            dist.all_reduce(summed)
            found.append(float(summed) / MICRO_BATCHES)
        return found


def run_rank(rank: int, cycles: int, address: str) -> None:
    on_time()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=address,
        rank=rank,
        world_size=len(WINDOWS),
        timeout=timedelta(minutes=5),
    )
    rates: dict[str, list[float]] = {method: [] for method in METHODS}
    losses: list[float] = []
    options = {"policy": Policy.FITS, "adapts": False, "isolates": False}
    with stretto.Background(f"exclusive:gang{rank}", **options) as background:
        ranks = {method: Rank(background) for method in METHODS}
        for cycle in range(cycles + 1):
            for method in METHODS:
                dist.barrier()
                begin_s = time.perf_counter()
                steps = range(STEPS * cycle, STEPS * (cycle + 1))
                found = ranks[method].train(method, steps)
                took_s = time.perf_counter() - begin_s
                if method == "claims":
                    losses += found
                if cycle:  # in the first one windows and tasks are learned
                    rates[method].append(STEPS * MICRO_BATCHES / took_s)
    if rank == 0:
        sys.stdout.write(json.dumps({"rates": rates, "losses": losses}) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        run_rank(chosen.rank, chosen.cycles, chosen.address)
        return
    result: dict = {
        "what": "micro-batches a second of three ranks with windows of 5, 50 and 90 %",
        "reach": "claims at least 2 times lock step; losses within 1e-5 of one process",
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"STRETTO_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        jobs = [
            job_of(
                role="foreground",
                device=f"exclusive:gang{rank}",
                computes=False,
                segments=[((1.0 - share) * PERIOD_S, share * PERIOD_S)],
            )
            for rank, share in enumerate(WINDOWS)
        ]
        for job in jobs:
            job.__enter__()
        address = f"file://{folder}/store"
        command = [sys.executable, str(Path(__file__)), "--cycles", str(chosen.cycles)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--address", address],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(len(WINDOWS))
        ]
        out = [rank.communicate()[0] for rank in ranks]
        for job in jobs:
            job.__exit__(None, None, None)
    found = json.loads(out[0])
    rates = found["rates"]
    for method in METHODS:
        result[method] = spread(rates[method])
    for method in ("claims", "fixed"):
        pairs = zip(rates[method], rates["lock step"], strict=True)
        result[f"{method} over lock step"] = spread([a / b for a, b in pairs])
    alone = losses_alone(len(found["losses"]))
    result["largest_difference_of_losses"] = max(
        abs(a - b) for a, b in zip(found["losses"], alone, strict=True)
    )
    if chosen.no_store:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        store("gang", result)


if __name__ == "__main__":
    main()
