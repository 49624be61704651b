"""What `elastic.py` trains."""

import torch

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
