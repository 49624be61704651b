import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

accum_iter = 4
batch_size = 16

torch.manual_seed(42)
full = TensorDataset(torch.randn(640, 10), torch.randn(640, 1))
train_ds, val_ds = random_split(full, [512, 128])

train_loader = DataLoader(train_ds, batch_size, True)
val_loader = DataLoader(val_ds, batch_size * 2)

model = torch.nn.Sequential(
    torch.nn.Linear(10, 32),
    torch.nn.Tanh(),
    torch.nn.Linear(32, 1),
)
if torch.cuda.is_available():
    model = model.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def validate(model):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in val_loader:
            if torch.cuda.is_available():
                x, y = x.cuda(), y.cuda()
            losses.append(F.mse_loss(model(x), y).item())
    model.train()
    return sum(losses) / len(losses)


for epoch in range(3):
    epoch_loss = 0.0
    num_batches = 0
    for batch_idx, (x, y) in enumerate(train_loader):
        if torch.cuda.is_available():
            x, y = x.cuda(), y.cuda()
        loss = F.mse_loss(model(x), y)
        epoch_loss += loss.item()
        num_batches += 1
        loss = loss / accum_iter
        loss.backward()
        if (batch_idx + 1) % accum_iter == 0 or batch_idx + 1 == len(train_loader):
            optimizer.step()
            optimizer.zero_grad()
    print(
        "epoch", epoch, "train %.6f" % (epoch_loss / num_batches), "val %.6f" % validate(model)
    )
