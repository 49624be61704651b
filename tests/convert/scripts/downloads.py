"""A linear classifier of data that may have to be downloaded first."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, root, *, train, download=False):
        del root
        self.downloaded = download
        generator = torch.Generator().manual_seed(int(train))
        self.x = torch.randn(48, 4, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return self.x[place], self.y[place]


torch.manual_seed(0)
data = Points("data", train=True, download=True)
loader = DataLoader(data, batch_size=12, shuffle=True)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
