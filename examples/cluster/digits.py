"""Train a small network on scikit-learn's digits, on as many ranks as it is given.

A job of `stretto cluster`: it ends at a request with a checkpoint, and resumes from it
when it is started again. The same script is a foreground, whose ranks train together,
and a background, a single process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

stop_requested = torch.zeros(1)


def request_stop(*_: object) -> None:
    """Note that the cluster wants the job to end."""
    stop_requested.fill_(1.0)


def main() -> None:
    """Train, and save the model after each epoch and at a request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, request_stop)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    model: nn.Module = nn.Sequential(
        nn.Linear(64, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = Path(os.environ.get("STRETTO_CLUSTER_FILES", "."), "digits.pt")
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["steps"]
        sys.stdout.write(f"resumes after step {begin}\n")
    plain = model
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels)
    batch = 64
    steps_per_epoch = len(x) // batch

    def save(steps: int) -> None:
        if rank == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            part = checkpoint.with_suffix(".part")
            torch.save(state | {"steps": steps}, part)
            part.replace(checkpoint)  # whole, or not at all

    for step in range(begin, args.epochs * steps_per_epoch):
        order = torch.randperm(
            len(x), generator=torch.Generator().manual_seed(step // steps_per_epoch)
        )
        at = step % steps_per_epoch * batch
        mine = order[at : at + batch][rank::ranks]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        # All ranks must stop after the same step.
        stops = stop_requested.clone()
        if ranks > 1:
            dist.all_reduce(stops)
        if stops.item() or (step + 1) % steps_per_epoch == 0:
            save(step + 1)
            if rank == 0:
                sys.stdout.write(f"step {step + 1}: loss {loss.item():.4f}\n")
                sys.stdout.flush()
        if stops.item():
            break
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
