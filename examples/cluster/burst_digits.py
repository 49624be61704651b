"""Train a multilayer perceptron on digits by the burst plan that the cluster made.

`stretto cluster` profiles what `make` returns, and names the plan's file. While the job
runs, it may request another plan. Without a plan, for instance because the profile was
too noisy, the job is data parallel.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stretto

BATCH, STEPS = 64, 200


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the model and example inputs."""
    layers: list[nn.Module] = [nn.Linear(64, 512), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), (torch.zeros(2, 64),)


def main() -> None:
    """Train on all ranks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    plain, inputs = make()
    plan = os.environ.get("STRETTO_CLUSTER_PLAN")
    model: nn.Module
    if plan:
        model = stretto.BurstParallel(plain, plan, example_inputs=inputs)
    else:
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    share = BATCH // ranks
    for step in range(STEPS):
        mine = (torch.arange(share) * ranks + rank + step * BATCH) % len(y)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        if isinstance(model, stretto.BurstParallel):
            model.follow_requests()  # on every rank, before the next forward
        if rank == 0 and step % 50 == 49:
            sys.stdout.write(f"step {step + 1}: loss {loss.item():.4f}\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
