"""Semi-supervised training: labeled and unlabeled batches side by side."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, seed):
    g = torch.Generator()
    g.manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def get_loaders(batch_size):
    labeled = DataLoader(make_data(256, 1), batch_size=batch_size, shuffle=True)
    unlabeled = DataLoader(make_data(512, 2), batch_size=2 * batch_size, shuffle=True)
    valid = DataLoader(make_data(200, 3), batch_size=50)
    return labeled, unlabeled, valid


@torch.no_grad()
def evaluate(model, loader, criterion, device):
    model.eval()
    loss_sum, n_correct, n = 0.0, 0, 0
    for x, target in loader:
        x, target = x.to(device), target.to(device)
        logits = model(x)
        loss_sum += criterion(logits, target).item() * x.size(0)
        n_correct += (logits.argmax(1) == target).sum().item()
        n += x.size(0)
    return loss_sum / n, n_correct / n


def main(epochs=3, batch_size=32):
    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    labeled, unlabeled, valid = get_loaders(batch_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 2))
    model = model.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(epochs):
        model.train()
        sup_sum = ent_sum = 0.0
        seen = 0
        for (x, t), (u, _) in zip(labeled, unlabeled):
            x, t, u = x.to(device), t.to(device), u.to(device)
            logits = model(torch.cat([x, u]))
            sup = criterion(logits[: len(x)], t)
            p = logits[len(x) :].softmax(1)
            entropy = -(p * p.log()).sum(1).mean()
            loss = sup + 0.1 * entropy
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sup_sum += sup.item() * x.size(0)
            ent_sum += entropy.item() * x.size(0)
            seen += x.size(0)
        val_loss, val_acc = evaluate(model, valid, criterion, device)
        print(
            f"epoch {epoch} sup {sup_sum / seen:.6f} ent {ent_sum / seen:.6f} "
            f"seen {seen} val {val_loss:.6f} acc {val_acc:.4f}"
        )


if __name__ == "__main__":
    main()
