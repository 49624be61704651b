from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 3e-3
    batch_size: int = 32
    epochs: int = 3
    ckpt: str = "trainer.pt"


class Trainer:
    def __init__(self, model, train_set, val_set, config):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.train_loader = DataLoader(
            train_set, batch_size=config.batch_size, shuffle=True
        )
        self.val_loader = DataLoader(val_set, batch_size=config.batch_size)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.criterion = nn.CrossEntropyLoss()
        self.history = []

    def fit(self):
        for epoch in range(self.config.epochs):
            train_loss = self._train_epoch(epoch)
            acc = self._evaluate()
            self.history.append(train_loss)
            print(f"epoch {epoch}: loss={train_loss:.6f} acc={acc:.4f}")
        self.save()

    def _train_epoch(self, epoch):
        self.model.train()
        running = 0.0
        for batch in self.train_loader:
            running += self._step(batch)
        return running / len(self.train_loader)

    def _step(self, batch):
        x, y = (t.to(self.device) for t in batch)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def _evaluate(self):
        self.model.eval()
        correct = total = 0
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            correct += (self.model(x).argmax(-1) == y).sum().item()
            total += len(y)
        return correct / total

    def save(self):
        torch.save(
            {"model": self.model.state_dict(), "history": self.history},
            self.config.ckpt,
        )


def main():
    torch.manual_seed(11)
    x = torch.randn(700, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 2))
    trainer = Trainer(
        model,
        TensorDataset(x[:512], y[:512]),
        TensorDataset(x[512:], y[512:]),
        Config(),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
