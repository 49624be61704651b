"""Loaders in containers, samplers, a class with a writer's name, and sums of epochs."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

torch.manual_seed(0)
x_all = torch.randn(96, 6)
data = TensorDataset(x_all, (x_all[:, 0] > 0).long())


class Experiment:
    """One training; on all ranks, although a library has such a class, too."""

    def __init__(self, size):
        self.net = nn.Linear(6, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.loaders = {"main": DataLoader(data, batch_size=size, shuffle=True)}
        self.loaders["extra"] = DataLoader(data, batch_size=size)
        self.more = []
        self.more.append(
            DataLoader(data, batch_size=size, sampler=RandomSampler(data))
        )

    def step(self, x, y):
        loss = F.cross_entropy(self.net(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            total = 0.0
            both = zip(self.loaders["main"], self.loaders["extra"], strict=True)
            for (x, y), (x2, y2) in both:
                total += self.step(torch.cat([x, x2]), torch.cat([y, y2]))
            print("both", epoch, f"{total:.6f}")
        return self


def predictions(model, loader):
    for x, y in loader:
        yield model(x).argmax(1), y


@torch.no_grad()
def score(model, loader):
    model.eval()
    hits = [float((p == y).sum()) for p, y in predictions(model, loader)]
    model.train()
    return sum(hits) / len(data)


def main():
    run = Experiment(12)
    run.fit(2)
    held_out = DataLoader(data, batch_size=10)
    for epoch in range(2):
        error = torch.tensor(0.0)
        for x, y in run.more[0]:
            run.step(x, y)
            with torch.no_grad():
                error += (run.net(x).softmax(1)[:, 1] - y).abs().sum()
        print("more", epoch, f"{error.item() / len(data):.6f}")
        print("score", epoch, f"{score(run.net, held_out):.6f}")


main()
