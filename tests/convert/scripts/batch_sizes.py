"""One training after another, each with the batch size written in another way."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x_all = torch.randn(100, 6)
data = TensorDataset(x_all, (x_all[:, 0] > 0).long())
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

CFG = {"data": {"bs": 12}, "lr": 0.1}
BATCH = 12
MICRO = 6


def step(x, y):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


# an entry of a dict, in both places
loader = DataLoader(data, batch_size=CFG["data"]["bs"], shuffle=True)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        if len(x) < CFG["data"]["bs"]:
            continue
        total += step(x, y)
    print("dict", epoch, f"{total:.6f}")

# keyword arguments in a dict
options = {"batch_size": BATCH, "shuffle": True}
with_options = DataLoader(data, **options)
for epoch in range(2):
    total = 0.0
    for x, y in with_options:
        n = x.size(0)
        if n != BATCH:
            continue
        total += step(x.view(BATCH, -1), y)
    print("options", epoch, f"{total:.6f}")


# a parameter's default
def build(size=BATCH):
    return DataLoader(data, batch_size=size, shuffle=True, drop_last=True)


built = build()
for epoch in range(2):
    total = 0.0
    for x, y in built:
        total += step(x + torch.ones(BATCH, 1), y)
    print("default", epoch, f"{total:.6f}")

# an expression
product = DataLoader(data, batch_size=MICRO * 2, shuffle=True)
for epoch in range(2):
    total = 0.0
    for x, y in product:
        if x.shape[0] not in (MICRO * 2,):
            continue
        total += step(x, y)
    print("product", epoch, f"{total:.6f}")

# functools.partial
make = partial(DataLoader, batch_size=BATCH)
made = make(data, shuffle=True)
for epoch in range(2):
    total = 0.0
    for x, y in made:
        if y.numel() < BATCH:
            continue
        total += step(x, y)
    print("partial", epoch, f"{total:.6f}")


# an object under a second name
@dataclass
class Config:
    batch_size: int = 12


class Data:
    def __init__(self, cfg):
        self.cfg = cfg
        self.loader = DataLoader(data, batch_size=cfg.batch_size, shuffle=True)


holder = Data(Config())
for epoch in range(2):
    total = 0.0
    for x, y in holder.loader:
        if x.shape != (holder.cfg.batch_size, 6):
            continue
        total += step(x, y)
    print("object", epoch, f"{total:.6f}")
