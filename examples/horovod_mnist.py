"""Train on digits with Horovod's interface: only the first import was changed.

Before: `import horovod.torch as hvd`, and `horovodrun -np 2 python horovod_mnist.py`.
Now:

    stretto run --nproc-per-node 2 examples/horovod_mnist.py
"""

# Written as scripts for Horovod are, not as this repository's own code.
# ruff: noqa: ANN001, ANN201, ANN204, D101, D102, D103, I001, N812, T201

import argparse

import stretto.horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batches-per-allreduce", type=int, default=1)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


hvd.init()
torch.manual_seed(args.seed)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
test_set = TensorDataset(images[1500:], labels[1500:])
train_sampler = DistributedSampler(
    train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
)
train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(
    test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)

model = Net().to(device)
scaled_lr = args.lr * args.batches_per_allreduce * hvd.size()
optimizer = optim.SGD(model.parameters(), lr=scaled_lr, momentum=args.momentum)

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    batches = args.batches_per_allreduce
    for batch_idx, (data, target) in enumerate(train_loader):
        if batch_idx % batches == 0:
            optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device)) / batches
        loss.backward()
        if (batch_idx + 1) % batches == 0:
            optimizer.step()
    if len(train_loader) % batches:
        optimizer.step()


def test():
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device)).cpu()
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += output.argmax(1).eq(target).float().sum().item()
    test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
    test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: loss {test_loss:.4f}, accuracy {100 * test_accuracy:.1f}%")


for epoch in range(1, args.epochs + 1):
    train(epoch)
    test()
