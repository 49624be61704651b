"""What people rely on with DDP, with a plan of several buckets, lanes and slices.

DDP itself is the oracle: on two ranks gradients, buffers and losses are its own bit
for bit, and what it refuses is refused in the same words.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.errors import StrettoError
from stretto.runtime import DistributedDataParallel
from support.plans import plan_in_turn, reversed_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel


def plan_of(module: nn.Module, ranks: int) -> Plan:
    """Three buckets against the order of declaration, on three lanes, in two slices."""
    names = reversed_names(module)
    share = -(-len(names) // 3)
    groups = [names[i : i + share] for i in range(0, len(names), share)]
    return plan_in_turn(groups, ranks=ranks, lanes=3, slices=2)


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def as_with_ddp(
    make: Callable[[], nn.Module], run: Any, rank: int, size: int, **settings: Any
) -> bool:
    """Whether ``run`` gives the same tensors with DDP, and with ours and a plan."""
    expected = run(TorchDDP(fresh(make), **settings), rank)
    ours = DistributedDataParallel(
        fresh(make), plan=plan_of(fresh(make), size), **settings
    )
    got = run(ours, rank)
    assert len(expected) > 0
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(got, expected, strict=True)
    )


def draw(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(*shape, generator=generator)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Mlp(nn.Module):
    """Blocks with batch norm, so that there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 6)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, save: str = "") -> torch.Tensor:
        for block in self.blocks:
            if save:
                x = checkpoint(block, x, use_reentrant=save == "reentrant")
            else:
                x = block(x)
        return self.head(x)


class Branches(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return self.head(getattr(self, branch)(x))


class Tied(nn.Module):
    """One weight as embedding and as output, one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.twice(torch.tanh(self.twice(self.words(x)))))


# Each runs some steps and gives the tensors that must be DDP's.


def run_saved(save: str) -> Any:
    def run(model: Any, rank: int) -> list[Any]:
        found = []
        for step in range(3):
            model.zero_grad()
            x = draw(rank, step, 5, 6).requires_grad_()
            model(x, save=save).square().mean().backward()
            found += gradients(model)
        return found + list(model.buffers())

    return run


def run_unused_over_micro_steps(model: Any, rank: int) -> list[Any]:
    """What only a micro-step under no_sync used is reduced with the rest."""
    found = []
    for step, (first, last) in enumerate(
        [("left", "right"), ("right", "left"), ("left", "left")]
    ):
        model.zero_grad()
        with model.no_sync():
            model(draw(rank, 2 * step, 5, 4), first).sum().backward()
        mine = gradients(model)
        model(draw(rank, 2 * step + 1, 5, 4), last).sum().backward()
        now = gradients(model)
        found += now
        if first != last:  # its gradient came under no_sync and nowhere else
            index = [n for n, _ in model.module.named_parameters()].index(
                f"{first}.weight"
            )
            mean = mine[index].clone()
            dist.all_reduce(mean)
            assert torch.equal(now[index], mean / dist.get_world_size())
    return found


def run_scaled(model: Any, rank: int) -> list[Any]:
    """Autocast and a scaler; in one step one rank's loss overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(draw(rank, step, 5, 6)).float().square().mean()
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        found += [torch.nan_to_num(norm), torch.tensor(scaler.get_scale())]
        found += [p.detach().clone() for p in model.parameters()]
    assert scaler.get_scale() != 2.0**10
    return found


def run_tied(model: Any, rank: int) -> list[Any]:
    found = []
    for step in range(3):
        model.zero_grad()
        x = torch.tensor([1 + rank, 7, 3 + step, 7])
        model(x).square().mean().backward()
        found += gradients(model)
    return found


def run_several_backwards(model: Any, rank: int) -> list[Any]:
    """Two forwards and backwards before one optimizer step, each of them reduced."""
    found = []
    for step in range(3):
        model.zero_grad()
        for part in range(2):
            model(draw(rank, 2 * step + part, 5, 6)).square().mean().backward()
            found += gradients(model)
    return found


def run_joined(divide_by_initial: bool) -> Any:
    def run(model: Any, rank: int) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                model(draw(rank, step, 5, 6)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()] + list(model.buffers())

    return run


def run_after_an_error_in_forward(model: Any, rank: int) -> list[Any]:
    found = []
    for step in range(4):
        model.zero_grad()
        if step == 1:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(draw(rank, step, 5, 7))
            continue
        model(draw(rank, step, 5, 6)).square().mean().backward()
        found += gradients(model)
    return found


def refusal(function: Any) -> tuple[str, str]:
    try:
        function()
    except Exception as exc:  # noqa: BLE001
        return type(exc).__name__, str(exc)[:60]
    return "", ""


def backward_twice(model: Any) -> None:
    loss = model(draw(0, 0, 5, 6)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def rank_keeps_promises(rank: int, size: int) -> dict[str, bool]:
    def same(make: Any, run: Any, **settings: Any) -> bool:
        return as_with_ddp(make, run, rank, size, **settings)

    found = {
        "unused over micro-steps": same(
            Branches, run_unused_over_micro_steps, find_unused_parameters=True
        ),
        "checkpoints": same(Mlp, run_saved("plain")),
        "reentrant checkpoints": same(Mlp, run_saved("reentrant"), static_graph=True),
        "scaler": same(Mlp, run_scaled),
        "scaler, views": same(Mlp, run_scaled, gradient_as_bucket_view=True),
        "tied": same(Tied, run_tied),
        "tied, static": same(Tied, run_tied, static_graph=True),
        "several backwards": same(Mlp, run_several_backwards),
        "joined": same(Mlp, run_joined(divide_by_initial=True)),
        "joined, effective": same(Mlp, run_joined(divide_by_initial=False)),
        "own buffers": same(Mlp, run_several_backwards, broadcast_buffers=False),
        "error in forward": same(Mlp, run_after_an_error_in_forward),
    }

    def both(make: Any, use: Any = lambda _model: None) -> list[tuple[str, str]]:
        return [
            refusal(lambda: use(TorchDDP(fresh(make)))),
            refusal(
                lambda: use(
                    DistributedDataParallel(
                        fresh(make), plan=plan_of(fresh(make), size)
                    )
                )
            ),
        ]

    theirs, ours = both(lambda: nn.SyncBatchNorm(4))
    found["synchronized batch norm"] = theirs == ours != ("", "")
    theirs, ours = both(Mlp, backward_twice)
    found["backward twice"] = theirs == ours
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_people_rely_on_is_as_with_ddp(ranks: Any) -> None:
    for found in ranks(rank_keeps_promises, 2, timeout_s=170, group_s=120.0):
        assert [name for name, kept in found.items() if not kept] == []


def rank_changes_the_plan_between_micro_steps(rank: int, size: int) -> list[str]:
    model = DistributedDataParallel(fresh(Branches), find_unused_parameters=True)
    plan = plan_of(fresh(Branches), size)
    with model.no_sync():
        model(draw(rank, 0, 5, 4), "left").sum().backward()
    try:
        model.apply_plan(plan)
        refused = ""
    except StrettoError as exc:
        refused = str(exc)
    model(draw(rank, 1, 5, 4), "right").sum().backward()
    # All ranks hold the mean, also of what only the first micro-step used.
    sums = [p.grad.clone() for p in model.parameters()]
    for total in sums:
        dist.all_reduce(total)
    equal = all(
        math.isclose(total.norm().item(), size * p.grad.norm().item(), rel_tol=1e-6)
        for total, p in zip(sums, model.parameters(), strict=True)
    )
    model.apply_plan(plan)
    dist.barrier()  # rank 0 holds the store that the other still asks
    return [refused, "equal" if equal else "differ"]


def test_a_plan_between_micro_steps_that_would_lose_gradients_is_refused(
    ranks: Any,
) -> None:
    for refused, equal in ranks(rank_changes_the_plan_between_micro_steps, 2):
        assert "not between the micro-steps of one" in refused
        assert equal == "equal"
