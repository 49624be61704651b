import logging
import os
import random

import numpy as np
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger(__name__)

EPOCHS = 4
BATCH_SIZE = 64
PATIENCE = 2
CKPT_DIR = "checkpoints"


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_one_epoch(model, loader, optimizer, scheduler, loss_fn, device):
    model.train()
    total_loss = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total_loss += loss.item() * x.size(0)
    return total_loss / len(loader.dataset)


def validate(model, loader, loss_fn, device):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            total += loss_fn(model(x), y).item()
    return total / len(loader)


if __name__ == "__main__":
    set_seed(1234)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    data = TensorDataset(torch.randn(1000, 12), torch.randn(1000, 3))
    indices = np.random.permutation(1000).tolist()
    train_loader = DataLoader(
        Subset(data, indices[:768]), batch_size=BATCH_SIZE, shuffle=True, num_workers=0
    )
    val_loader = DataLoader(Subset(data, indices[768:]), batch_size=BATCH_SIZE)
    model = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 3)).to(device)
    loss_fn = nn.SmoothL1Loss()
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    warm = OneCycleLR(optimizer, max_lr=5e-3, total_steps=EPOCHS * len(train_loader))
    plateau = ReduceLROnPlateau(optimizer, patience=0)

    if not os.path.exists(CKPT_DIR):
        os.makedirs(CKPT_DIR)

    best, bad_epochs = float("inf"), 0
    for epoch in range(EPOCHS):
        train_loss = train_one_epoch(
            model, train_loader, optimizer, warm, loss_fn, device
        )
        val_loss = validate(model, val_loader, loss_fn, device)
        plateau.step(val_loss)
        logger.info("epoch %d train %.6f val %.6f", epoch, train_loss, val_loss)
        print(f"{epoch} {train_loss:.6f} {val_loss:.6f}")
        if val_loss < best:
            best, bad_epochs = val_loss, 0
            torch.save(model.state_dict(), os.path.join(CKPT_DIR, "best.pt"))
        else:
            bad_epochs += 1
            if bad_epochs >= PATIENCE:
                print("early stop")
                break

    model.load_state_dict(torch.load(os.path.join(CKPT_DIR, "best.pt")))
    print(f"best {validate(model, val_loader, loss_fn, device):.6f}")
