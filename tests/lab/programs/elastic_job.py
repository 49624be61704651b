"""What `elastic.py` trains, and the same in one process."""

import torch

from stretto.elastic.batches import order_of, share

SAMPLES, BATCH = 211, 24


def net_and_optimizer():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.SiLU(), torch.nn.Linear(64, 5)
    ).double()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def data():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, generator=generator).double(), i % 5) for i in range(SAMPLES)
    ]


def loss_of(model, batch):
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def replay(history, steps):
    """Train as the members of a history did; return losses by step and member."""
    net, optimizer = net_and_optimizer()
    samples = data()
    epoch, done, found = 0, 0, []
    for step in range(steps):
        ids = next(ids for first, ids in reversed(history) if first <= step)
        count = min(BATCH, SAMPLES - done)
        order = order_of(SAMPLES, epoch=epoch, seed=0, shuffle=True)
        optimizer.zero_grad()
        losses = {}
        for rank, member in enumerate(ids):
            mine = [order[done + i] for i in share(count, len(ids), rank)]
            inputs = torch.stack([samples[i][0] for i in mine])
            targets = torch.tensor([samples[i][1] for i in mine])
            loss = loss_of(net, (inputs, targets)) * len(mine) / count
            loss.backward()
            losses[member] = loss.item()
        optimizer.step()
        found.append(losses)
        done += count
        if done >= SAMPLES:
            epoch, done = epoch + 1, 0
    return found
