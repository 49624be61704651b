"""Clipping by parts, against PyTorch's DDP and its clipping.

Ranks poison what is pending, so everything counts as under way until it is finished.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto import variable_names
from stretto.runtime import DistributedDataParallel
from stretto.runtime.forward.lazy import LazyGradient
from support.forward_models import MODELS, OPTIMIZERS, SHAPE
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

STEPS = 5
CLIP = 0.05


def by_parts(net: nn.Module, ranks: int, dtype: str, **settings: Any) -> Any:
    names = reversed_names(net)
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    plan = plan_in_turn(groups, ranks=ranks, lanes=2, slices=2, wire_dtype=dtype)
    plan = replace(plan, overlap="forward", launch=tuple(range(len(groups)))[::-1])
    return DistributedDataParallel(net, plan=plan, exact_clipping=False, **settings)


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SHAPE, generator=generator).to(dtype)


Between = "Callable[[Any, Any, int], torch.Tensor]"
"""What a program does between backward and the step; returns the norm."""


def clipped(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def clipped_by_maximum(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP, norm_type=float("inf"))


def clipped_after_values(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def clipped_twice(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    nn.utils.clip_grad_norm_(model.parameters(), 2 * CLIP)
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def clipped_a_part(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    parameters = list(model.parameters())
    return nn.utils.clip_grad_norm_(parameters[::2], CLIP)


def clipped_after_a_look(model: Any, _optimizer: Any, step: int) -> torch.Tensor:
    """Rank 0 alone reads a gradient before."""
    if dist.get_rank() == 0 and step % 2:
        assert next(model.parameters()).grad.sum().isfinite()
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def refused_once(model: Any, _optimizer: Any, step: int) -> torch.Tensor:
    if step == 3:
        for parameter in model.parameters():
            parameter.grad.mul_(float("inf"))
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1, error_if_nonfinite=True)
        except RuntimeError:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def unclipped(model: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    return torch.zeros(())


PROGRAMS = (
    clipped,
    clipped_by_maximum,
    clipped_after_values,
    clipped_twice,
    clipped_a_part,
    clipped_after_a_look,
    refused_once,
    unclipped,
)


def train(
    kind: str,
    name: str,
    wrap: Callable[[nn.Module], Any],
    between: Any,
    dtype: torch.dtype,
    *,
    micro: int = 1,
    scaled: bool = False,
) -> tuple[list[float], list[torch.Tensor], bool]:
    """Norms, parameters, and whether gradients were under way after each backward."""
    torch.manual_seed(3)
    model = wrap(MODELS[kind]().to(dtype))
    (optimizer,) = OPTIMIZERS[name](model)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=64.0)
    norms, lazy = [], True
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            last = part == micro - 1
            inputs = batch(dist.get_rank(), 10 * step + part, dtype)
            if last:
                scaler.scale(model(inputs).square().mean()).backward()
            else:
                with model.no_sync():
                    scaler.scale(model(inputs).square().mean()).backward()
        gradients = [p.grad for p in model.parameters()]
        lazy = lazy and (step == 0 or any(type(g) is LazyGradient for g in gradients))
        del gradients
        scaler.unscale_(optimizer)
        norms.append(float(between(model, optimizer, step)))
        scaler.step(optimizer)
        scaler.update()
    return norms, [p.detach().clone() for p in model.parameters()], lazy


def outcome(
    kind: str,
    name: str,
    between: Any,
    dtype: torch.dtype,
    *,
    views: bool,
    **settings: Any,
) -> tuple[float, float, bool, bool]:
    """Differences of norms and parameters, whether ranks are equal, and under way."""
    size = dist.get_world_size()
    text = str(dtype).removeprefix("torch.")
    ours = train(
        kind,
        name,
        lambda net: by_parts(net, size, text, gradient_as_bucket_view=views),
        between,
        dtype,
        **settings,
    )
    theirs = train(kind, name, TorchDDP, between, dtype, **settings)
    pairs = zip(ours[0], theirs[0], strict=True)
    norm = max(abs(a - b) / (abs(b) or 1.0) for a, b in pairs)
    values = zip(ours[1], theirs[1], strict=True)
    far = max(float((a - b).abs().max()) for a, b in values)
    flat = torch.cat([p.reshape(-1) for p in ours[1]])
    first = flat.clone()
    dist.broadcast(first, 0)
    return norm, far, torch.equal(first, flat), ours[2]


def rank_clips(rank: int, size: int) -> dict[str, Any]:
    os.environ[variable_names.POISON] = "1"
    double, single = torch.float64, torch.float32
    found: dict[str, Any] = {}
    # Four ranks add what two don't show: sums in another order than DDP's.
    few = (clipped, clipped_after_a_look) if size > 2 else PROGRAMS
    for number, between in enumerate(few):
        views = bool(number % 2)
        found[between.__name__] = outcome(
            "Attention", "Adam", between, double, views=views
        )
    kinds = ("Convolutions", "Tied", "Recurrent") if size == 2 else ("Convolutions",)
    for kind in kinds:
        found[kind] = outcome(kind, "SGD momentum", clipped, double, views=True)
    found["micro"] = outcome("Inner", "Adam", clipped, double, views=False, micro=2)
    found["scaled"] = outcome("Inner", "SGD", clipped, double, views=True, scaled=True)
    found["single"] = outcome("Attention", "SGD", clipped, single, views=True)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_norms_and_parameters_are_those_of_ddp(ranks: Any, size: int) -> None:
    for found in ranks(rank_clips, size, timeout_s=100):
        for name, (norm, far, equal, under_way) in found.items():
            limit = 1e-6 if name == "single" else 1e-12
            assert norm <= limit, name
            assert far <= 100 * limit, name
            assert equal, name
            assert under_way, name


def rank_differs(rank: int, size: int) -> list[bool]:
    """One rank alone can't overlap, another is observed: all continue."""
    os.environ[variable_names.POISON] = "1"
    found = []
    for what in ("scripted", "armed"):
        torch.manual_seed(3)
        net = MODELS["Convolutions"]()
        if what == "scripted" and rank == 0:
            net.unused = torch.jit.script(nn.Tanh())
        model = by_parts(net, size, "float32")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step, torch.float32)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if what == "armed" and rank == 0 and step == 1:
                model._planned.overlap.armed = False
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        first = flat.clone()
        dist.broadcast(first, 0)
        found.append(torch.equal(first, flat) and bool(flat.isfinite().all()))
    return found


def test_what_one_rank_can_t_do_changes_no_other_rank_s_collectives(
    ranks: Any,
) -> None:
    assert ranks(rank_differs, 2) == [[True, True]] * 2
