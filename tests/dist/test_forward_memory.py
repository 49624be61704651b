"""Overlap with the next forward where a program keeps memory or changes states.

Pending values are poisoned, as in `test_forward_overlap`; the same buckets with
backward alone are the oracle.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto
from stretto import variable_names
from stretto.runtime import DistributedDataParallel
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


class CountsInPython(torch.optim.Optimizer):
    """Keeps a number in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"] / self.state[p]["step"])


class Run:
    """A model, its optimizer, and what the program keeps."""

    def __init__(self, optimizer_of: Any, forward: bool, size: int, views: bool):
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        names = reversed_names(self.net)
        plan = plan_in_turn([names[:2], names[2:]], ranks=size, lanes=2, slices=2)
        if forward:
            plan = replace(plan, overlap="forward", launch=(0, 1))
        self.model = DistributedDataParallel(
            self.net, plan=plan, gradient_as_bucket_view=views
        )
        self.optimizer: Any = optimizer_of(self.net.parameters())
        self.kept: Any = None
        self.rate = torch.tensor(0.9)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def counting(parameters: Any) -> Any:
    return stretto.separable(CountsInPython(parameters))


def loads_states(run: Run, step: int) -> Any:
    if step == 2:
        run.kept = copy.deepcopy([run.optimizer.state_dict(), run.net.state_dict()])
    if step == 4:
        run.optimizer.load_state_dict(run.kept[0])
        run.net.load_state_dict(run.kept[1])
    return None


def drops_states(run: Run, step: int) -> Any:
    if step == 3:
        run.optimizer.state = defaultdict(dict)
    if step == 4:
        run.optimizer.state.clear()
    return None


def switches_momentum_on(run: Run, step: int) -> Any:
    if step == 3:
        run.optimizer.param_groups[0]["momentum"] = 0.9
    return None if step < 4 else copy.deepcopy(run.optimizer.state_dict())


def changes_a_tensor_in_a_tuple(run: Run, step: int) -> Any:
    if step == 0:
        run.optimizer.param_groups[0].update(
            betas=(run.rate, torch.tensor(0.99)), lr=torch.tensor(0.01), foreach=False
        )
    if step == 3:
        run.rate.fill_(0.5)
    return None


def saves_states(run: Run, step: int) -> Any:
    return copy.deepcopy(run.optimizer.state_dict()) if step > 2 else None


def keeps_part_of_a_state(run: Run, step: int) -> Any:
    if step == 2:
        state = run.optimizer.state[run.net[0].weight]
        run.kept = state["exp_avg"].view(-1)
    return run.kept.clone() if step > 2 else None


def shares_memory_with_processes(run: Run, step: int) -> Any:
    if step == 2:
        run.net.share_memory()
        run.kept = run.net[0].weight
    if step < 3:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return run.kept.detach().clone()


AFTER_STEP: dict[str, tuple[Any, Callable[[Run, int], Any]]] = {
    "loads states": (adam, loads_states),
    "drops states": (adam, drops_states),
    "switches momentum on": (sgd, switches_momentum_on),
    "changes a tensor in a tuple": (adam, changes_a_tensor_in_a_tuple),
    "saves a number": (counting, saves_states),
    "keeps part of a state": (adam, keeps_part_of_a_state),
    "shares memory": (adam, shares_memory_with_processes),
}


def train(run: Run, rank: int, use: Any, flat: bool, zero: Any) -> list[Any]:
    found: list[Any] = []
    kept: list[torch.Tensor] = []
    for step in range(6):
        run.optimizer.zero_grad(set_to_none=zero)
        generator = torch.Generator().manual_seed(100 * rank + step)
        loss = run.model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        if flat and step == 2:
            kept = [p.grad.view(-1) for p in run.net.parameters()]
        found += [loss.detach(), *(tensor.clone() for tensor in kept)]
        run.optimizer.step()
        if use is not None:
            found.append(use(run, step))
    found.append(copy.deepcopy(run.optimizer.state_dict()))
    return [*found, [p.detach().clone() for p in run.net.parameters()]]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same(left[key], right[key]) for key in left
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def rank_uses_memory(rank: int, size: int) -> list[str]:
    cases = [
        (name, o, use, False, True, False) for name, (o, use) in AFTER_STEP.items()
    ]
    cases += [
        (f"keeps views of gradients {none=} {views=}", sgd, None, True, none, views)
        for none, views in ((False, False), (False, True), (True, True))
    ]
    wrong = []
    for name, optimizer_of, use, flat, none, views in cases:
        both = [
            train(Run(optimizer_of, forward, size, views), rank, use, flat, none)
            for forward in (False, True)
        ]
        if not same(*both):
            wrong.append(name)
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_memory_and_states_that_a_program_keeps_are_exact(ranks: Any) -> None:
    assert ranks(rank_uses_memory, 2, timeout_s=60) == [[], []]
