"""Statements that share lines, objects that are called, a loss class, and counts."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, size_average=True):
        super().__init__()
        self.gamma, self.size_average = gamma, size_average

    def forward(self, logits, target):
        logp = logits.log_softmax(1).gather(1, target.view(-1, 1)).view(-1)
        loss = -((1 - logp.exp()) ** self.gamma) * logp
        if self.size_average:
            return loss.mean()
        else:
            return loss.sum()


class Accumulator:
    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *values):
        self.data = [a + float(b) for a, b in zip(self.data, values)]


class Saver:
    def __init__(self): self.best = float("inf")

    def __call__(self, value, net):
        if value < self.best: self.best = value; self.save(net)

    def save(self, net):
        torch.save(dict(net=net.state_dict(), best=self.best), "compact.pt")


def hits(logits, target):
    return (logits.argmax(1) == target).sum()


torch.manual_seed(4)
x = torch.randn(192, 6); y = (x[:, 0] > x[:, 1]).long()
net = nn.Linear(6, 2); opt = torch.optim.SGD(net.parameters(), lr=0.02)
data = TensorDataset(x, y); loader = DataLoader(data, batch_size=24, shuffle=True)
criterion = FocalLoss(size_average=False); saver = Saver()
for epoch in range(3):
    metric = Accumulator(3)
    for a, b in loader:
        logits = net(a); loss = criterion(logits, b)
        opt.zero_grad(); loss.backward(); opt.step()
        metric.add(loss.item(), hits(logits, b), b.numel())
    total, right, seen = metric.data; print(epoch, total / seen, right / seen, seen)
    saver(total / seen, net)
    sys.stdout.write(f"last {loss.item():.5f}\n")
net.load_state_dict(torch.load("compact.pt")["net"])
print(net(x).sum().item())
