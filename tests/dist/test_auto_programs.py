"""Programs that DDP allows, under ``plan="auto"`` while it tunes, against DDP."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto import variable_names
from stretto.errors import StrettoError
from stretto.tune import TuneOptions, controller
from stretto.tune import initial_profile as look
from stretto.tune.forced import FORCED
from support.checks import Lines
from support.nets import mlp
from support.steady_network import use_steady_network

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

TorchDDP = nn.parallel.DistributedDataParallel

OPTIONS = TuneOptions(steps=10, watch=False, plan_cache=False)

STEPS = 30

REBUILT = 3
"""From this step on DDP has rebuilt its buckets, which needs all ranks in a forward."""


net = partial(mlp, 64, 200, 200, 4)


MAX_STEPS = 400
"""By then tuning has settled, also on a busy machine."""


def train(
    model: nn.Module, rank: int, between: Any = None, most: int = STEPS
) -> list[float]:
    """Losses of steps, each after what ``between`` does; up to `most` to settle."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(most):
        if step >= STEPS and getattr(model, "_auto", True) is None:
            break
        generator = torch.Generator().manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        if between is not None:
            between(model, rank, step, generator)
        loss = model(torch.randn(16, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def micro_steps_differ(model: Any, rank: int, step: int, g: torch.Generator) -> None:
    with model.no_sync():
        for _ in range((7 * step + 3 * rank) % 4):
            model(torch.randn(16, 64, generator=g)).square().mean().backward()


def one_rank_runs_forward(
    model: Any, rank: int, step: int, _g: torch.Generator
) -> None:
    if rank == 1 and step % 3 == 1 and step >= REBUILT:
        model(torch.ones(3, 64))


def collectives_between(model: Any, rank: int, step: int, _g: torch.Generator) -> None:
    if step < REBUILT:
        return
    if rank == 0:
        model(torch.ones(3, 64))
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        model(torch.ones(3, 64))
    dist.barrier()


def errors_are_caught(model: Any, rank: int, step: int, _g: torch.Generator) -> None:
    if step % 4 == rank:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 63))


def saves_and_copies(model: Any, rank: int, step: int, _g: torch.Generator) -> None:
    if rank == 0 and step < 14:
        torch.save(model, io.BytesIO())
        torch.save(model.module, io.BytesIO())
        pickle.dumps(model.module)
        copy.deepcopy(model.module)


def backward_twice(model: Any, _rank: int, _step: int, g: torch.Generator) -> None:
    loss = model(torch.randn(16, 64, generator=g)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def forwards_first(model: Any, _rank: int, _step: int, g: torch.Generator) -> None:
    losses = [model(torch.randn(16, 64, generator=g)).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()


PROGRAMS = (
    micro_steps_differ,
    one_rank_runs_forward,
    collectives_between,
    errors_are_caught,
    saves_and_copies,
    backward_twice,
    forwards_first,
)


def programs(rank: int, size: int) -> dict[str, tuple[bool, int]]:
    found = {}
    for between in PROGRAMS:
        settled: list[Any] = []
        theirs = train(TorchDDP(net()), rank, between)
        model = stretto.DistributedDataParallel(
            net(), on_settled=settled.append, tune=OPTIONS
        )
        ours = train(model, rank, between)
        # The plan was changed meanwhile.
        found[between.__name__] = (ours == theirs, model._iterations > 0)
    return found


def test_ranks_may_differ_between_reduced_backwards(ranks: Any) -> None:
    expected = {program.__name__: (True, True) for program in PROGRAMS}
    assert ranks(programs, 2, timeout_s=380.0, group_s=120.0) == [expected] * 2


def fails(*_args: Any, **_kwargs: Any) -> Any:
    raise ValueError("no luck today")


FAULTS = {
    "probe": (look, "probe_network", 1),
    "fit": (look, "fit_cluster", 0),
    "profile": (look.DeferredProfile, "reduced", 1),
    "start of the profile": (look.DeferredProfile, "start", 0),
    "planner": (look.planners, "plan_with_wire", 0),
    "report": (controller, "summary", 0),
}


def faults(rank: int, size: int) -> dict[str, tuple[bool, bool, list[str]]]:
    use_steady_network()
    found = {}
    lines = Lines(logging.WARNING)
    theirs = train(TorchDDP(net()), rank, most=MAX_STEPS)

    def trained(model: Any) -> tuple[bool, bool, list[str]]:
        ours = train(model, rank, most=MAX_STEPS)
        return ours == theirs[: len(ours)], model.plan is None, lines.lines[:]

    for name, (target, attribute, where) in FAULTS.items():
        before = getattr(target, attribute)
        if rank == where:
            setattr(target, attribute, fails)
        found[name] = trained(stretto.DistributedDataParallel(net(), tune=OPTIONS))
        setattr(target, attribute, before)
        lines.lines.clear()
    # What the user does with the result may fail, too.
    found["on_settled"] = trained(
        stretto.DistributedDataParallel(
            net(), tune=OPTIONS, on_settled=fails if rank == 1 else None
        )
    )
    return found


def test_a_failure_of_tuning_on_one_rank_returns_all_ranks_to_ddp(ranks: Any) -> None:
    first, second = ranks(faults, 2, timeout_s=300.0, group_s=120.0)
    assert first.keys() == second.keys()
    for name, (same, plain, lines) in first.items():
        assert (same, plain) == second[name][:2] == (True, True), name
        where = FAULTS[name][2] if name in FAULTS else 1
        why = f"rank {where}: ValueError: no luck today"
        assert lines == [f"cannot make a plan, DDP's own rule stays in use: {why}"]
        assert second[name][2] == []


def differ(rank: int, size: int) -> list[tuple[str, str]]:
    found = []
    for options in (
        {"tune": TuneOptions(steps=10 + rank)},
        {"wire_dtype": "bfloat16" if rank else None},
        {"plan": "ddp" if rank else "auto"},
        {"plan": "/nonexistent" if rank else "auto"},
    ):
        try:
            stretto.DistributedDataParallel(net(), **options)
        except StrettoError as exc:
            found.append((type(exc).__name__, str(exc)))
    return found


def test_options_that_differ_are_one_error_on_all_ranks(ranks: Any) -> None:
    first, second = ranks(differ, 2, timeout_s=200.0)
    assert first[:2] == second[:2]
    assert "option tune: rank 0 reported TuneOptions(steps=10" in first[0][1]
    assert "option wire_dtype: rank 0 reported None; rank 1 reported" in first[1][1]
    assert "'ddp'" in first[2][1]
    assert second[3][0] == "SpecError"
    assert "/nonexistent" in first[3][1]


def transforms(rank: int, size: int, kind: str) -> list[list[torch.Tensor]]:
    """Return the results of a transform of the whole model after each step."""
    model = {"ddp": TorchDDP, "auto": stretto.DDP}[kind](nn.Linear(6, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            parameter.add_(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(26):
        x = torch.full((2, 6), 0.1 * step + rank)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step:  # DDP's own rebuild of its buckets fails in a transform
            found.append(list(torch.func.jvp(model, (x,), (torch.ones(2, 6),))))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_transform_of_the_model_works_after_each_change_of_the_plan(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, FORCED)
    wanted, found = (ranks(transforms, 2, kind) for kind in ("ddp", "auto"))
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one, other))
