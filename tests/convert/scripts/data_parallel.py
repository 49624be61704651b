import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)

x = torch.randn(128, 4)
dataset = TensorDataset(x, x.pow(2).sum(1, keepdim=True))
loader = DataLoader(dataset=dataset, batch_size=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.MSELoss()

history = []
for epoch in range(3):
    for xb, yb in loader:
        loss = loss_fn(model(xb.to(device)), yb.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss))
    print("epoch %d: %.6f" % (epoch, sum(history[-8:]) / 8))
