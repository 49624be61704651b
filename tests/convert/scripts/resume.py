import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--out", default="checkpoint.pth.tar", type=str)
best_loss = 1e9


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name):
        self.name = name
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def main():
    global best_loss
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    start_epoch = 0
    # optionally resume from a checkpoint
    if args.resume:
        if os.path.isfile(args.resume):
            print("=> loading checkpoint '{}'".format(args.resume))
            checkpoint = torch.load(args.resume)
            start_epoch = checkpoint["epoch"]
            best_loss = checkpoint["best_loss"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        else:
            print("=> no checkpoint found at '{}'".format(args.resume))

    g = torch.Generator().manual_seed(5)
    x = torch.randn(320, 6, generator=g)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    train_loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=False)

    for epoch in range(start_epoch, args.epochs):
        loss = train(train_loader, model, criterion, optimizer, epoch, device)
        is_best = loss < best_loss
        best_loss = min(loss, best_loss)
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_loss": best_loss,
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, args.out)
        if is_best:
            print(f"best so far {best_loss:.6f}")


def train(train_loader, model, criterion, optimizer, epoch, device):
    losses = AverageMeter("Loss")
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Epoch [{epoch}] Loss {losses.avg:.6f}")
    return losses.avg


if __name__ == "__main__":
    main()
