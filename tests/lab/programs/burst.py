"""Three burst-parallel steps of a small VGG; prints JSON: exactness, bytes sent."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from stretto import BurstParallel
from stretto.burst.graph import capture
from stretto.schema.burst import BurstPlan, LayerGpus
from stretto.testing.models import VGG

STEPS, BATCH = 3, 10

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = VGG(11, width=2, dense=256, image=32, classes=10, dropout=0, activation=nn.SiLU)
alone = copy.deepcopy(model)
x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
graph = capture(model, (x,))
plan = BurstPlan(
    profile_digest=graph.digest,
    gpus=ranks,
    batch=BATCH,
    amplification_limit=None,
    layers=tuple(
        LayerGpus(
            layer=node.name,
            gpus=1 if node.name.startswith("classifier") else ranks,
            first_gpu=0,
        )
        for node in graph.nodes
    ),
)
burst = BurstParallel(model, plan, example_inputs=(x,))
mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)


def sent_bytes() -> int:
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        total += int(counters.split()[8]) if name.strip() == "eth0" else 0
    return total


before = sent_bytes()
optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (burst, alone)]
for _ in range(STEPS):
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.functional.cross_entropy(burst(x[mine]), y[mine]).backward()
    nn.functional.cross_entropy(alone(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
dist.barrier()
sent = torch.tensor(float(sent_bytes() - before))
dist.all_reduce(sent)
state = burst.full_state_dict()
differs = max(
    float((state[name] - value).abs().max() / value.abs().max())
    for name, value in alone.state_dict().items()
)
if rank == 0:
    size = sum(p.nbytes for p in alone.parameters())
    print(
        json.dumps(
            {
                "differs": differs,
                "sent_bytes": float(sent),
                # A ring sends 2 (ranks - 1) / ranks of the gradients from each rank.
                "data_parallel_bytes": STEPS * 2 * (ranks - 1) * size,
                "sample_bytes": STEPS * graph.by_name["classifier.0"].activation_bytes,
            }
        )
    )
dist.destroy_process_group()
