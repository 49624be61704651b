"""Two heads, of which each loss uses one, with a whole test set and progress."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
torch.manual_seed(0)
x = torch.randn(128, 8)
y = (x[:, 0] > 0).long()
test_x = torch.randn(50, 8)
test_y = (test_x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.valid = nn.Linear(16, 1)
        self.label = nn.Linear(16, 2)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.valid(hidden), self.label(hidden)


net = Discriminator()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
mse = nn.MSELoss()
ce = nn.CrossEntropyLoss()

for epoch in range(2):
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        valid, _ = net(images)
        d_loss = mse(valid, torch.ones_like(valid))
        d_loss.backward()
        optimizer.step()

        optimizer.zero_grad()
        _, logits = net(images)
        info_loss = ce(logits, labels)
        info_loss.backward()
        optimizer.step()

        print(
            "[{}/{}] {:.6f} {:.6f}".format(
                step * BATCH + len(images),
                len(loader.dataset),
                d_loss.item(),
                info_loss.item(),
            )
        )
    _, logits = net(test_x)
    hits = (logits.argmax(1) == test_y).sum().item()
    print(f"accuracy {hits / test_y.size(0):.3f}, {hits} right")
