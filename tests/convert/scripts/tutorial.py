"""A trainer class given a model, a loader and an optimizer that functions made."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 20, generator=generator)
        self.targets = self.inputs @ torch.linspace(-1, 1, 20)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index : index + 1]


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every):
        self.device = device
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        print(f"epoch {epoch} | steps {len(self.train_data)}")
        total = 0.0
        for source, targets in self.train_data:
            source = source.to(self.device)
            targets = targets.to(self.device)
            total += self._run_batch(source, targets)
        print(f"loss {total / len(self.train_data):.6f}")

    def _save_checkpoint(self, epoch):
        torch.save({"epoch": epoch, "model": self.model.state_dict()}, "tutorial.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def load_objects():
    torch.manual_seed(2)
    data = Points(256)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return data, model, optimizer


def prepare_loader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def main(device, epochs, save_every, batch_size):
    dataset, model, optimizer = load_objects()
    train_data = prepare_loader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer, device, save_every)
    trainer.train(epochs)


if __name__ == "__main__":
    main("cuda:0" if torch.cuda.is_available() else "cpu", 3, 2, 32)
