"""A plain DDP script: nothing in it knows of stretto."""

import gc
import json
import statistics
import sys
import time

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
for step in range(int(sys.argv[1])):
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
