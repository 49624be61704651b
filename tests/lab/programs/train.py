"""A plain DDP script: nothing in it knows of stretto.

Arguments: the maximum number of steps and, optionally, a path; training ends early once
a file exists there.
"""

import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear(64, 600), nn.SiLU()]
for _ in range(4):
    layers += [nn.Linear(600, 600), nn.SiLU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(600, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seconds, losses = [], []
stop = Path(sys.argv[2]) if len(sys.argv) > 2 else None
for step in range(int(sys.argv[1])):
    if stop is not None and step % 20 == 0:
        ended = torch.tensor(float(stop.exists()))
        dist.broadcast(ended, 0)
        if ended.item() > 0:
            break
    begin = time.perf_counter()
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    loss = model(torch.randn(16, 64, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    print(json.dumps({"losses": losses, "step_s": statistics.median(seconds[-8:])}))
# So that the group's threads end here: docs/known-issues-of-torch.md.
del model, optimizer, loss
gc.collect()
dist.destroy_process_group()
