"""A training run that re-plans every few steps, beside DDP's on the same data."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan, tensors_digest

MARKS = 5
NUM_PLANS = 5


def net() -> nn.Module:
    """Return a small model with buffers, the same at every call."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 96),
        nn.BatchNorm1d(96),
        nn.ReLU(),
        nn.Linear(96, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )


def random_plan(model: nn.Module, ranks: int, rng: random.Random) -> Plan:
    """Return a random plan of buckets, lanes and slices for a model in float32."""
    rows = [
        (n, p.numel() * p.element_size(), "float32")
        for n, p in model.named_parameters()
    ][::-1]
    names = [row[0] for row in rows]
    buckets, lanes = [], rng.randint(1, 4)
    while names:
        size = rng.randint(1, len(names))
        buckets.append(
            Bucket(
                tensors=tuple(names[:size]),
                lane=rng.randrange(lanes),
                slices=rng.randint(1, 4),
                wire_dtype="float32",
            )
        )
        names = names[size:]
    return Plan(
        planner="random",
        workload_digest=tensors_digest(rows),
        ranks=ranks,
        overlap=rng.choice(["backward", "none"]),
        lanes=lanes,
        buckets=tuple(buckets),
    )


def count_sockets() -> int:
    """Return the number of sockets that this process holds."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except OSError:
            continue
    return count


def soak(rank: int, size: int, *, steps: int, every: int) -> dict[str, Any]:
    """Return the losses' first difference, and the resources held at five moments.

    ``None`` replaces one plan in ``NUM_PLANS + 1``: DDP's own rule.
    """
    rng = random.Random(7)
    plans = [*(random_plan(net(), size, rng) for _ in range(NUM_PLANS)), None]
    ours, stock = DistributedDataParallel(net()), TorchDDP(net())
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, stock)
    ]
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {
        "steps": steps,
        "plans": 0,
        "first difference": None,
        "sockets": [],
        "threads": [],
        "resident_bytes": [],
    }
    for step in range(steps):
        if step % every == 0:
            # All plans occur in the first share of the run, before the second mark.
            ours.apply_plan(plans[found["plans"] % len(plans)])
            found["plans"] += 1
        x = torch.randn(16, 24, generator=generator)
        losses = []
        for model, optimizer in zip((ours, stock), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if losses[0] != losses[1] and found["first difference"] is None:
            found["first difference"] = step
        if (step + 1) % (steps // MARKS) == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found["sockets"].append(count_sockets())
            found["threads"].append(len(list(Path("/proc/self/task").iterdir())))
            found["resident_bytes"].append(pages * 4096)
    return found
