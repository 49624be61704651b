"""One DDP step over Gloo; prints JSON: whether gradients agree, what was sent."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512))
torch.manual_seed(1 + dist.get_rank())
model(torch.randn(4, 512)).square().mean().backward()

mine = model.module.weight.grad
mean = mine.clone()
dist.all_reduce(mean)
mean /= dist.get_world_size()

sent = {}
for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
    name, _, counters = line.partition(":")
    sent[name.strip()] = int(counters.split()[8])
if dist.get_rank() == 0:
    print(
        json.dumps(
            {
                "ranks": dist.get_world_size(),
                "agree": torch.allclose(mine, mean),
                "gradient_bytes": mine.numel() * 4,
                "sent_bytes": sent,
            }
        )
    )
# Without any other reference to the group its threads end here, not under the
# interpreter's finalization, where they may abort: docs/known-issues-of-torch.md.
del model
gc.collect()
dist.destroy_process_group()
