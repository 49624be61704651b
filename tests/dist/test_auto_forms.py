"""Static graphs, forwards within a backward and default devices, against DDP."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import stretto
from stretto.tune import TuneOptions
from support.checks import Lines
from support.plans import plan_in_turn, reversed_names

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel

OPTIONS = TuneOptions(steps=6, watch=False, plan_cache=False)

STEPS = 26


class Net(nn.Module):
    """``form``: which parameters get a gradient, and how often."""

    def __init__(self, form: str = "once") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        if self.form == "checkpointed":
            x = checkpoint(self.second, x, use_reentrant=True)
        elif self.form == "twice":  # each time in a backward of its own
            for _ in range(2):
                x = checkpoint(self.second, x, use_reentrant=True)
        elif self.form != "unused":
            x = self.second(x)
        return self.last(x)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 9 + rank))


def plain(model: Any, rank: int, step: int) -> None:
    model(data(step, rank)).square().mean().backward()


def after_micro_steps(model: Any, rank: int, step: int) -> None:
    if step > 1:  # DDP itself fails before
        with model.no_sync():
            plain(model, rank, step + 500)
    plain(model, rank, step)


def of_an_earlier_graph(model: Any, rank: int, step: int) -> None:
    loss = model(data(step, rank)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()  # its gradients are not reduced


def forward_first(model: Any, rank: int, step: int) -> None:
    losses = [model(data(step + n, rank)).square().mean() for n in (0, 500)]
    if step > 1:
        losses.append(model(data(step, 3)).mean())
    for loss in losses[::-1]:
        loss.backward()


def evaluates_in_backward(model: Any, rank: int, step: int) -> None:
    def hook(_gradient: torch.Tensor) -> None:
        with torch.no_grad():
            model(data(step, 7))

    def watch(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(hook)

    handle = model.module.second.register_forward_hook(watch)
    loss = model(data(step, rank)).square().mean()
    handle.remove()
    loss.backward()


def hooked_at(first: int) -> Any:
    """Steps from whose ``first`` on one of DDP's hooks in C++ compresses gradients."""

    def hooked(model: Any, rank: int, step: int) -> None:
        if step == first:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        plain(model, rank, step)

    return hooked


def under_another_device(model: Any, rank: int, step: int) -> None:
    x = data(step, rank)
    with torch.device("meta"):  # as after torch.set_default_device
        model(x).square().mean().backward()


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "micro-steps": (after_micro_steps, "once", {"static_graph": True}),
    "micro-steps, unused looked for": (
        after_micro_steps,
        "once",
        {"static_graph": True, "find_unused_parameters": True},
    ),
    "retained": (of_an_earlier_graph, "once", {"static_graph": True}),
    "forwards first": (forward_first, "once", {"static_graph": True}),
    "checkpointed": (plain, "checkpointed", {"static_graph": True}),
    "hook in C++, early": (hooked_at(3), "once", {}),
    "hook in C++, later": (hooked_at(11), "once", {}),
    "another default device": (under_another_device, "once", {}),
}

LEFT = {
    "twice": (after_micro_steps, "twice", {"static_graph": True}),
    "unused": (plain, "unused", {"static_graph": True}),
}


def train(model: Any, rank: int, step_of: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        step_of(model, rank, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def both(rank: int, size: int) -> dict[str, tuple[bool, bool, list[str]]]:
    found = {}
    lines = Lines(logging.WARNING)
    for name, (step_of, form, settings) in (CASES | LEFT).items():
        lines.lines.clear()
        theirs = train(TorchDDP(Net(form), **settings), rank, step_of)
        model = stretto.DistributedDataParallel(Net(form), tune=OPTIONS, **settings)
        ours = train(model, rank, step_of)
        same = all(map(torch.equal, theirs, ours))
        found[name] = same, model._iterations > 0, lines.lines[:]
    theirs = train(TorchDDP(Net(), bucket_cap_mb=0.01), rank, evaluates_in_backward)
    hooked = train(TorchDDP(Net()), rank, hooked_at(3))
    for overlap in ("backward", "none"):
        groups = [(name,) for name in reversed_names(Net())]
        plan = plan_in_turn(groups, ranks=size, lanes=2, overlap=overlap)
        model = stretto.DistributedDataParallel(Net(), plan=plan)
        ours = train(model, rank, evaluates_in_backward)
        same = all(map(torch.equal, theirs, ours))
        found[f"evaluated, {overlap}"] = same, False, []
        model = stretto.DistributedDataParallel(Net(), plan=plan)
        ours = train(model, rank, hooked_at(3))
        same = all(map(torch.equal, hooked, ours))
        found[f"hook in C++, {overlap}"] = same, False, []
    return found


def _is_busy(line: str) -> bool:
    return "explain the measured" in line or "is too short for two sizes" in line


def test_forms_that_a_new_plan_could_break(ranks: Any) -> None:
    first, second = ranks(both, 2, timeout_s=380.0, group_s=120.0)
    for row in (first, second):
        assert [name for name, found in row.items() if not found[0]] == []
    for name in CASES:  # plans changed meanwhile
        for _same, changed, lines in (first[name], second[name]):
            assert changed, name
            # On a busy machine no model may fit the measured times, or probes take too
            # long to make one.
            assert [x for x in lines if not _is_busy(x)] == [], name
    for name in LEFT:
        changed, lines = first[name][1:]
        assert not changed, name
        assert [line for line in lines if "static_graph=True" in line] == lines
        assert len(lines) == 1
        assert second[name][1:] == (False, []), name
