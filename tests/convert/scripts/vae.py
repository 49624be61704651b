"""Autoencoding with losses summed over the batch, as in the VAE example."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_loader = DataLoader(
    TensorDataset(torch.rand(256, 16)), batch_size=64, shuffle=True
)
test_loader = DataLoader(TensorDataset(torch.rand(96, 16)), batch_size=32)


class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.enc = nn.Linear(16, 12)
        self.mu = nn.Linear(12, 4)
        self.dec = nn.Linear(4, 16)

    def forward(self, x):
        mu = self.mu(torch.tanh(self.enc(x)))
        return torch.sigmoid(self.dec(mu)), mu


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


# Reconstruction + penalty summed over all elements and batch
def loss_function(recon_x, x, mu):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return BCE + 0.5 * torch.sum(mu.pow(2))


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu = model(data)
        loss = loss_function(recon_batch, data, mu)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(
                "Train Epoch: {} [{}/{}]\tLoss: {:.5f}".format(
                    epoch,
                    batch_idx * len(data),
                    len(train_loader.dataset),
                    loss.item() / len(data),
                )
            )
    print(
        "====> Epoch: {} Average loss: {:.5f}".format(
            epoch, train_loss / len(train_loader.dataset)
        )
    )


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data,) in enumerate(test_loader):
            data = data.to(device)
            recon_batch, mu = model(data)
            test_loss += loss_function(recon_batch, data, mu).item()
    test_loss /= len(test_loader.dataset)
    print("====> Test set loss: {:.5f}".format(test_loss))


if __name__ == "__main__":
    for epoch in range(1, 4):
        train(epoch)
        test(epoch)
