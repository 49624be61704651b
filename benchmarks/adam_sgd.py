"""Train with AdamSGD and linear decay, and with AdamW and step decay, at equal steps.

    python benchmarks/adam_sgd.py

Two jobs on real data: a small transformer that predicts the next character of Python's
own reference texts, and a convolutional network on scikit-learn's digits. Each of the
four combinations of optimizer and schedule takes its learning rate from the same grid
by a seed of its own; then three other seeds are trained. The result is the loss on data
that was not trained on. It does not depend on the machine's load. About 25 minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from _record import store
from stretto.optim import AdamSGD, LinearDecay

if TYPE_CHECKING:
    from collections.abc import Callable

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
STEPS = 800
WARMUP = 40
WINDOW = 64


class Characters(nn.Module):
    """A transformer of two blocks over single characters."""

    def __init__(self, kinds: int, width: int = 64) -> None:
        super().__init__()
        self.symbols = nn.Embedding(kinds, width)
        self.places = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next characters, (batch, window, kinds)."""
        x = self.symbols(ids) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x)).transpose(1, 2)


class Text:
    """The reference texts, the last tenth of them for validation."""

    def __init__(self) -> None:
        text = "\n".join(topics[key] for key in sorted(topics))
        kinds = sorted(set(text))
        numbers = {kind: number for number, kind in enumerate(kinds)}
        ids = torch.tensor([numbers[kind] for kind in text])
        cut = len(ids) * 9 // 10
        self.train, self.rest, self.kinds = ids[:cut], ids[cut:], len(kinds)
        starts = torch.arange(0, len(self.rest) - WINDOW - 1, WINDOW)[:200]
        self.valid = self._windows(self.rest, starts)

    def model(self) -> nn.Module:
        return Characters(self.kinds)

    def batch(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - WINDOW - 1, (16,), generator=draws)
        return self._windows(self.train, starts)

    @staticmethod
    def _windows(ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + torch.arange(WINDOW)
        return ids[places], ids[places + 1]


class Digits:
    """The 8 x 8 digits, the last fifth of them for validation."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
        y = torch.tensor(labels)
        cut = len(y) * 4 // 5
        self.x, self.y, self.valid = x[:cut], y[:cut], (x[cut:], y[cut:])

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def batch(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        some = torch.randint(len(self.y), (32,), generator=draws)
        return self.x[some], self.y[some]


def adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


def adam_sgd(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return AdamSGD(parameters, lr=rate, weight_decay=0.01, min_steps=100)


def linear_decay(optimizer: torch.optim.Optimizer) -> LinearDecay:
    return LinearDecay(optimizer, STEPS, WARMUP)


def step_decay(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm up linearly; a tenth from half of the steps on, a hundredth from 3/4 on."""

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.1 ** ((step >= STEPS // 2) + (step >= STEPS * 3 // 4))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


METHODS: dict[str, tuple[Callable, Callable]] = {
    "AdamW, step decay": (adamw, step_decay),
    "AdamW, linear decay": (adamw, linear_decay),
    "AdamSGD, step decay": (adam_sgd, step_decay),
    "AdamSGD, linear decay": (adam_sgd, linear_decay),
}


def final_loss(data: Text | Digits, method: str, rate: float, seed: int) -> dict:
    """Train one model; return its loss on the validation data."""
    torch.manual_seed(seed)
    model, draws = data.model(), torch.Generator().manual_seed(seed)
    make, schedule_of = METHODS[method]
    optimizer = make(list(model.parameters()), rate)
    schedule = schedule_of(optimizer)
    switched_at: list[int] = []
    for step in range(STEPS):
        x, y = data.batch(draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        if isinstance(optimizer, AdamSGD):
            switched_at += [step] * (len(optimizer.switched()) - len(switched_at))
    model.eval()
    with torch.no_grad():
        x, y = data.valid
        loss = float(nn.functional.cross_entropy(model(x), y))
    return {
        "loss": loss if math.isfinite(loss) else None,
        "tensors": len(list(model.parameters())),
        "switched": len(switched_at),
        "median_switch": statistics.median(switched_at) if switched_at else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict] = {}
    for name, data in (("text", Text()), ("digits", Digits())):
        found[name] = {}
        for method in METHODS:
            tried = {
                rate: final_loss(data, method, rate, TUNING_SEED)["loss"]
                for rate in RATES
            }
            rate = min(tried, key=lambda rate: tried[rate] or math.inf)
            runs = [final_loss(data, method, rate, seed) for seed in SEEDS]
            losses = [run["loss"] for run in runs]
            found[name][method] = {
                "rate": rate,
                "tried": tried,
                "mean": statistics.mean(losses),
                "min": min(losses),
                "max": max(losses),
                "runs": runs,
            }
            row = found[name][method]
            sys.stderr.write(
                f"{name}, {method}: {row['mean']:.4f} ({row['min']:.4f} to "
                f"{row['max']:.4f}), rate {rate:g}, switched "
                f"{runs[0]['switched']} of {runs[0]['tensors']} at "
                f"{runs[0]['median_switch']}\n"
            )
    store("adam_sgd", {"what": "validation loss, mean of three seeds", **found})


if __name__ == "__main__":
    main()
