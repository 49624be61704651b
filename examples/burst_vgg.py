"""Train a VGG on handwritten digits, each layer on as many hosts as it can use.

stretto lab run --hosts 4 --link 1gbit -- python examples/burst_vgg.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import stretto


def vgg() -> nn.Sequential:
    """Return a small VGG: eight convolutions, three large dense layers."""
    layers: list[nn.Module] = []
    before = 1
    for width in (16, 0, 32, 0, 64, 64, 0, 128, 128, 128, 128):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.SiLU()]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs in (128, 1024):
        layers += [nn.Linear(inputs, 1024), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


dist.init_process_group("gloo")
rank, ranks, share = dist.get_rank(), dist.get_world_size(), 16
images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(load_digits().target)
torch.manual_seed(0)
model = vgg()
cluster = stretto.probe(budget_s=20.0)
size = {"batch": share * ranks, "gpus": ranks}
layers = stretto.profile_layers(model, (images[:2],), max_spread_ratio=2.0, **size)
plan = stretto.plan_layers(layers, cluster=cluster, cores=2.0, **size)
model = stretto.BurstParallel(model, plan, example_inputs=(images[:2],))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(300):
    batch = (torch.arange(share) * ranks + rank + step * share * ranks) % len(labels)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 60 == 59:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)  # noqa: T201
state = model.full_state_dict()  # on every rank
dist.barrier()
