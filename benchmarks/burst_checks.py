"""Measure the CPU time of checking a burst model at construction and in each step.

Run ``OMP_NUM_THREADS=1 python benchmarks/burst_checks.py``. For each model it captures
the layers with and without the proof, on one thread, and prints the median CPU time of
several captures in seconds; and of what compares a capture with the module before each
step in milliseconds: the watch of values, and forward's code that runs again, beside a
forward of the module. ``--out`` stores the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.burst.graph import capture

if TYPE_CHECKING:
    from collections.abc import Callable


def mlp() -> tuple[nn.Module, Tensor]:
    """Return 100 linear layers with norms."""
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(4, 64)


class Bottleneck(nn.Module):
    """A bottleneck block of a residual network."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.conv1 = nn.Conv2d(before, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.short: nn.Module | None = None
        if stride > 1 or before != after:
            self.short = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for ``(batch, channels, height, width)``."""
        h = functional.relu(self.bn1(self.conv1(x)))
        h = functional.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return functional.relu(h + (x if self.short is None else self.short(x)))


def resnet101(width: int = 8) -> tuple[nn.Module, Tensor]:
    """Return a ResNet-101 with fewer channels, on images of 32 by 32."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = width
    for i, count in enumerate((3, 4, 23, 3)):
        inner = width << i
        for j in range(count):
            layers.append(Bottleneck(before, inner, 2 if i and not j else 1))
            before = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers), torch.randn(4, 3, 32, 32)


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for ``(batch, tokens, width)``."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(c, dim=2)
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in (q, k, v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """A GPT of 24 blocks."""

    def __init__(self, width: int = 64, tokens: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(24))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits for ``(batch, tokens)``."""
        h = self.embedding(ids) + self.position
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(self.norm(h))
        return found


def gpt() -> tuple[nn.Module, Tensor]:
    """Return the GPT and its example input."""
    return Gpt(), torch.randint(0, 100, (4, 16))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "100-layer MLP with norms": mlp,
    "ResNet-101, narrow": resnet101,
    "24-block GPT": gpt,
}


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Return median CPU seconds of a capture, in total and without the proof."""
    model, example = MODELS[name]()
    found: dict[str, Any] = {}
    for key, verify in (("all_s", True), ("without_proof_s", False)):
        times = []
        for _ in range(repeats + 1):
            start = time.process_time()
            graph = capture(model, (example,), verify=verify)
            times.append(time.process_time() - start)
        found[key] = round(statistics.median(times[1:]), 3)
        found["layers"] = len(graph.nodes)
        if verify:
            found["first_s"] = round(times[0], 3)
    steps: dict[str, Callable[[], object]] = {
        "watch_ms": graph.outdated,
        "code_again_ms": graph.rerun_difference,
        "forward_ms": lambda: model(example),
    }
    costs: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(10 * repeats):
        for key, call in steps.items():
            start = time.process_time()
            call()
            costs[key].append(1e3 * (time.process_time() - start))
    return found | {k: round(statistics.median(v), 2) for k, v in costs.items()}


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    for name in MODELS:
        found[name] = measure(name, options.repeats)
        print(f"{name}: {found[name]}", flush=True)
    if options.out is not None:
        result = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu_time": found,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
