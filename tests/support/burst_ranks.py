"""What ranks of burst-parallel tests share: random plans, shares, and the oracle."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stretto.burst.executor import BurstParallel
from stretto.burst.graph import capture
from stretto.schema.burst import BurstPlan, LayerGpus
from stretto.testing import models

smooth: Any = nn.SiLU
"""With ReLU, rounding switches units on and off, and equal methods drift apart."""


def make_model(kind: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(5)
    small: Any = {"classes": 10, "activation": smooth}
    if kind.startswith("vgg"):
        return models.VGG(
            int(kind[3:]), width=4, dense=12, image=32, dropout=dropout, **small
        )
    if kind == "wide resnet":
        return models.WideResNet(width=2, blocks=(1, 2, 1, 1), **small)
    if kind == "inception":
        return models.InceptionV3(width=0.04, blocks="ABCDE", dropout=dropout, **small)
    return models.Transformer(width=8, layers=2, heads=2, context=6, dropout=dropout)


def make_data(kind: str, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    if kind == "transformer":
        x = torch.randint(0, 256, (batch, 6), generator=draw)
        return x, torch.randint(0, 256, (batch, 6), generator=draw)
    side = {"inception": 80, "wide resnet": 64}.get(kind, 32)
    x = torch.randn(batch, 3, side, side, generator=draw)
    return x, torch.randint(0, 10, (batch,), generator=draw)


def plan_of(
    model: nn.Module, example: torch.Tensor, widths: Any, gpus: int
) -> BurstPlan:
    """A plan with the first rank and the width that ``widths(position)`` gives."""
    graph = capture(copy.deepcopy(model).train(), (example,))
    ranges = [widths(i) for i in range(len(graph.nodes))]
    return BurstPlan(
        profile_digest=graph.digest,
        gpus=gpus,
        batch=8,
        amplification_limit=None,
        layers=tuple(
            LayerGpus(layer=node.name, first_gpu=first, gpus=width)
            for node, (first, width) in zip(graph.nodes, ranges, strict=True)
        ),
    )


def random_plan(
    model: nn.Module, example: torch.Tensor, gpus: int, seed: int
) -> BurstPlan:
    draw = random.Random(seed)

    def ranks(_position: int) -> tuple[int, int]:
        width = draw.randint(1, gpus)
        return draw.randint(0, gpus - width) if draw.random() < 0.4 else 0, width

    return plan_of(model, example, ranks, gpus)


def shares_of(batch: int, size: int, kind: str) -> list[int]:
    if kind == "even":
        return [batch // size + (r < batch % size) for r in range(size)]
    if kind == "one":  # all on the last rank
        return [0] * (size - 1) + [batch]
    shares: list[int] = []
    for r in range(size - 1):
        shares.append((batch - sum(shares)) * (r + 2) // (size + 2))
    return [*shares, batch - sum(shares)]


def part(tensor: torch.Tensor, shares: list[int], rank: int) -> torch.Tensor:
    start = sum(shares[:rank])
    return tensor[start : start + shares[rank]]


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    scale = float(wanted.detach().abs().max())
    return float((found - wanted).detach().abs().max()) / (scale or 1.0)


def worst_grad(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest error of this rank's gradients, relative to the largest."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    scale = max(float(q.grad.abs().max()) for _, q in pairs if q.grad is not None)
    found = [
        float((p.grad - q.grad).abs().max())
        for p, q in pairs
        if p.grad is not None and q.grad is not None
    ]
    return max(found, default=0.0) / scale


def global_loss(loss: torch.Tensor, shares: list[int], rank: int) -> float:
    """The mean loss over all samples, from each rank's over its own."""
    mine = float(loss.detach()) * shares[rank] / sum(shares) if shares[rank] else 0.0
    total = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def layers_with_gradients(burst: BurstParallel) -> set[str]:
    """Return layers whose parameters all have one; without parameters, by ranks."""
    rank = dist.get_rank()
    found = set()
    for node in burst._follower.graph_now().nodes:
        first, width = burst.widths[node.name]
        grads = [p.grad is not None for p in node.module.parameters()]
        assert len(set(grads)) <= 1, node.name
        if grads[0] if grads else first <= rank < first + width:
            found.add(node.name)
    return found


def compare(
    kind: str,
    rank: int,
    size: int,
    *,
    seed: int,
    shares: str,
    steps: int,
    batch: int = 9,
    lr: float = 0.01,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, float]:
    """Largest relative differences from one process with the whole batch."""
    model = make_model(kind).to(dtype)
    reference = copy.deepcopy(model)
    x, _ = make_data(kind, 2, 0)
    example = x if kind == "transformer" else x.to(dtype)
    burst = BurstParallel(
        model,
        random_plan(model, example, size, seed),
        example_inputs=(example,),
        **options,
    )
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m in (burst, reference)
    ]
    cross_entropy = nn.functional.cross_entropy
    found = {"loss": 0.0, "grad": 0.0}
    counts = shares_of(batch, size, shares)
    for step in range(steps):
        x, y = make_data(kind, batch, step)
        x = x if kind == "transformer" else x.to(dtype)
        output = burst(part(x, counts, rank))
        loss = cross_entropy(output, part(y, counts, rank))
        wanted = cross_entropy(reference(x), y)
        for value, optimizer in ((loss, optimizers[0]), (wanted, optimizers[1])):
            optimizer.zero_grad()
            value.backward()
        assert layers_with_gradients(burst) == {
            name
            for name, (first, width) in burst.widths.items()
            if first <= rank < first + width
        }
        found["grad"] = max(found["grad"], worst_grad(burst.module, reference))
        truth = float(wanted.detach())
        off = abs(global_loss(loss, counts, rank) - truth) / truth
        found["loss"] = max(found["loss"], off)
        for optimizer in optimizers:
            optimizer.step()
    state = burst.full_state_dict()
    found["state"] = max(
        worst(state[name].double(), value.double())
        for name, value in reference.state_dict().items()
    )
    return found
