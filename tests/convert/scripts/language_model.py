"""A tiny character-level transformer, trained by steps rather than epochs."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

block_size = 16
n_embd = 32
max_steps = 24
eval_interval = 8

text = "the quick brown fox jumps over the lazy dog and runs away from it again. " * 12
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}


class CharDataset(Dataset):
    def __init__(self, text):
        self.ids = torch.tensor([stoi[c] for c in text])

    def __len__(self):
        return len(self.ids) - block_size - 1

    def __getitem__(self, i):
        chunk = self.ids[i : i + block_size + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.ln2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 2 * n_embd), nn.GELU(), nn.Linear(2 * n_embd, n_embd)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        mask = torch.ones(x.size(1), x.size(1), device=x.device).tril()
        att = (q @ k.transpose(-2, -1)) / math.sqrt(n_embd)
        att = att.masked_fill(mask == 0, float("-inf")).softmax(-1)
        x = x + self.proj(att @ v)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(chars), n_embd)
        self.pos = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(n_embd, len(chars))

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        logits = self.head(self.blocks(self.tok(idx) + self.pos(pos)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizer(self, lr, weight_decay):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr)

    @torch.no_grad()
    def generate(self, idx, n):
        for _ in range(n):
            logits, _ = self(idx[:, -block_size:])
            idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return idx


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def train():
    torch.manual_seed(1337)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(CharDataset(text), batch_size=32, shuffle=True, drop_last=True)
    model = GPT().to(device)
    print("%.3f k parameters" % (sum(p.numel() for p in model.parameters()) / 1e3))
    optimizer = model.configure_optimizer(lr=3e-3, weight_decay=0.1)
    batches = cycle(loader)
    for step in range(max_steps):
        x, y = next(batches)
        logits, loss = model(x.to(device), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % eval_interval == 0 or step == max_steps - 1:
            print(f"step {step} loss {loss.item():.6f} ppl {math.exp(loss.item()):.4f}")
    model.eval()
    start = torch.zeros(1, 1, dtype=torch.long, device=device)
    print(len(model.generate(start, 20)[0].tolist()))


if __name__ == "__main__":
    train()
