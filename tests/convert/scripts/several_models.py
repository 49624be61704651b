"""Models kept in a list and a dict beside their own names, and a list of optimizers."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x[:, :1].sin()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

encoder = nn.Linear(8, 16)
first, second = [nn.Linear(16, 1) for _ in range(2)]
heads = [first, second]
parts = {"encoder": encoder, "first": first}
optimizers = [torch.optim.SGD(head.parameters(), lr=0.05) for head in heads]
optimizers.append(torch.optim.Adam(parts["encoder"].parameters(), lr=0.01))
mse = nn.MSELoss()

for epoch in range(2):
    for head in heads:
        head.train()
    for inputs, targets in loader:
        hidden = encoder(inputs).relu()
        one = mse(first(hidden), targets)
        other = mse(second(hidden.detach()), targets.abs())
        for optimizer in optimizers:
            optimizer.zero_grad()
        one.backward()
        other.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"{one.item():.6f} {other.item():.6f}")
    with torch.no_grad():
        outputs = [head(encoder(x).relu()) for head in heads]
    print(f"{mse(outputs[0], y).item():.6f} {mse(outputs[1], y.abs()).item():.6f}")
