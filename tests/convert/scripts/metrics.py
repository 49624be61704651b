"""Sums of a training loop in dicts, lists, arrays and tuples, and a ratio of them."""

import functools
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x_all = torch.sin(torch.arange(48 * 6) * 1.7).view(48, 6)
data = TensorDataset(x_all, (x_all[:, 0] > 0).long())
make = functools.partial(DataLoader, batch_size=12)
loaders = {"train": make(data, shuffle=True), "again": DataLoader(data, 8)}
again = loaders["again"]


def iou(net, loader, opt):
    conf = torch.zeros(2, 2)
    for x, y in loader:
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad(); loss.backward(); opt.step()
        conf += torch.bincount(2 * y + out.argmax(1), minlength=4).view(2, 2)
    each = conf.diag() / (conf.sum(0) + conf.sum(1) - conf.diag() + 1e-6)
    return each.mean().item()


class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.loader = make(data, shuffle=True)

    def fit(self):
        for epoch in range(2):
            stats, counts, history = defaultdict(float), {"n": 0}, []
            pair, array, total, n = [0.0, 0], np.zeros(2), 0.0, 0
            table = torch.zeros(2, 2, dtype=torch.long)
            kinds = Counter()
            for x, y in self.loader:
                out = self.net(x)
                loss = F.cross_entropy(out, y)
                self.opt.zero_grad(); loss.backward(); self.opt.step()
                stats["loss"] += loss.item() * len(x)
                stats["hits"] += (out.argmax(1) == y).sum().item()
                counts["n"] = counts["n"] + len(x)
                history += [loss.item()]
                pair[0] += loss.item() * len(x)
                pair[1] += len(x)
                array += [loss.item() * len(x), len(x)]
                total, n = total + loss.item() * len(x), n + len(x)
                kinds["one"] += (y == 1).sum().item()
                for t, p in zip(y, out.argmax(1)):
                    table[t, p] += 1
            print(epoch, round(stats["loss"] / counts["n"], 5), stats["hits"])
            print(round(sum(history) / len(history), 5), round(pair[0] / pair[1], 5))
            print(round(array[0] / array[1], 5), round(total / n, 5), kinds["one"])
            print((table.diag() / table.sum(1)).mean().item(), table.tolist())


net = nn.Linear(6, 2)
Trainer(net).fit()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    print(epoch, f"iou {iou(net, again, opt):.5f}")
