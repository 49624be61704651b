"""A VGG learns handwritten digits, each layer on as many hosts as it can use.

stretto lab run --hosts 4 --link 1gbit -- python examples/burst_vgg.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import stretto
from stretto._api import burst
from stretto.testing.models import VGG

dist.init_process_group("gloo")
rank, ranks, share = dist.get_rank(), dist.get_world_size(), 16
images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(load_digits().target)
torch.manual_seed(0)
model = VGG(11, width=16, dense=1024, image=8, channels=1, classes=10)
cluster = stretto.probe(budget_s=20.0)
size = {"batch": share * ranks, "gpus": ranks}
example = (images[:2],)
measured = burst.profile_on_ranks(model, example, max_spread_ratio=2.0, **size)
task = burst.problem(measured, cluster=cluster, **size)
plan, _ = burst.plan_on(task, cluster, cores=2.0)
model = stretto.BurstParallel(model, plan, example_inputs=example)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(300):
    batch = (torch.arange(share) * ranks + rank + step * share * ranks) % len(labels)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 60 == 59:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)  # noqa: T201
dist.barrier()
