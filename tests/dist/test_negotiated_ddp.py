"""DistributedDataParallel(order="negotiated") against DDP, and lost ranks."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import subprocess
import sys
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import stretto
from stretto.errors import CommTimeout, SpecError, StrettoError
from stretto.runtime.negotiated import CollectiveKind, Engine, EngineOptions, Request
from support.ranks import Ranks

pytestmark = pytest.mark.dist


def net(widths: tuple[int, ...] = (12, 30, 20, 3)) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.GELU()]
    return nn.Sequential(*layers)


class Forked(nn.Module):
    """Uses the branches that it is given, in their order."""

    def __init__(self, branches: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(branches))

    def forward(self, x: torch.Tensor, path: list[int]) -> torch.Tensor:
        x = self.trunk(x)
        for i in path:
            x = torch.tanh(self.branches[i](x))
        return x


def negotiated(model: nn.Module, **more: Any) -> Any:
    return stretto.DistributedDataParallel(
        model, order="negotiated", unit_bytes=1500, timeout_s=20.0, **more
    )


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(
        [*a.parameters(), *a.buffers()], [*b.parameters(), *b.buffers()], strict=True
    )
    return all(torch.equal(mine, its) for mine, its in pairs)


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def equal(mine: list[Any], its: list[Any]) -> list[bool]:
    return [
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(mine, its, strict=True)
    ]


def _like_ddp(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(rank)
    ours, ddp = negotiated(net()), TorchDDP(net())
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, ddp)
    ]
    agree = []
    for step in range(9):
        xs = [torch.randn(8, 12) for _ in range(3)]
        for model, optimizer in zip((ours, ddp), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 3 == 1:
                with model.no_sync():
                    model(xs[0]).square().mean().backward()
            model(xs[1]).square().mean().backward()
            if step % 3 == 2:  # a second backward adds to reduced gradients
                model(xs[2]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        agree.append(same(ours, ddp))
    found["steps"] = agree
    found["kept"] = ours._negotiated.in_stable_order
    found["state"] = sorted(ours.state_dict()) == sorted(ddp.state_dict())
    found["unused"] = _unused(rank)
    found["orders"] = _orders(rank)
    found["checkpoint"] = _checkpointed()
    found["error"] = _error_in_backward(rank)
    found["refused"] = _refusals(ours)
    found["gone"] = _gone()
    copy = pickle.loads(pickle.dumps(ours))
    x = torch.randn(8, 12)
    for model in (copy, ddp):
        model.zero_grad()
        model(x).square().mean().backward()
    found["copy"] = all(equal(gradients(copy), gradients(ddp)))
    return found


def _unused(rank: int) -> list[bool]:
    ours, ddp = negotiated(Forked()), TorchDDP(Forked(), find_unused_parameters=True)
    agree = []
    for step in range(8):
        # Branch 2 on rank 0 only, branch 3 on no rank; later all by both.
        path = [[0, 2], [0, 1]][rank] if step < 6 else [0, 1, 2, 3]
        x = torch.randn(5, 6)
        for model in (ours, ddp):
            model.zero_grad()
            model(x, path).square().mean().backward()
        agree += equal(gradients(ours), gradients(ddp))
        if step < 6:
            assert ours.module.branches[3].weight.grad is None
    # What a rank used under no_sync only is not lost (PyTorch's issue 69031).
    ours.zero_grad()
    reference = Forked()
    reference.load_state_dict(ours.module.state_dict())
    x, path = torch.randn(5, 6), [[0, 2], [0, 1]][rank]
    with ours.no_sync():
        ours(x, path).square().mean().backward()
    ours(x, [0]).square().mean().backward()
    reference(x, path).square().mean().backward()
    reference(x, [0]).square().mean().backward()
    for mine, alone in zip(ours.parameters(), reference.parameters(), strict=True):
        there = torch.tensor(float(alone.grad is not None))
        total = torch.zeros_like(alone) if alone.grad is None else alone.grad / 2
        dist.all_reduce(total)
        dist.all_reduce(there)
        agree.append(
            mine.grad is None if not there else torch.allclose(mine.grad, total)
        )
    return agree


def _orders(rank: int) -> list[bool]:
    """Branches in another order on each rank and step."""
    ours, alone = negotiated(Forked(6)), Forked(6)
    agree = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        path = torch.randperm(6, generator=generator).tolist()
        x = torch.randn(5, 6, generator=generator)
        ours.zero_grad()
        alone.zero_grad()
        ours(x, path).square().mean().backward()
        alone(x, path).square().mean().backward()
        for mine, parameter in zip(ours.parameters(), alone.parameters(), strict=True):
            total = parameter.grad / 2
            dist.all_reduce(total)
            agree.append(torch.equal(mine.grad, total))
    return agree


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i == 0 else checkpoint(block, x, use_reentrant=i % 2 == 0)
        return x


def _checkpointed() -> list[bool]:
    ours, ddp = negotiated(Checkpointed()), TorchDDP(Checkpointed())
    agree = []
    for _ in range(5):
        x = torch.randn(3, 6)
        for model in (ours, ddp):
            model.zero_grad()
            model(x).square().mean().backward()
        agree += equal(gradients(ours), gradients(ddp))
    return agree


class Trap(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Trap.armed:
            raise ValueError("the user's own")
        return gradient


def _error_in_backward(rank: int) -> list[str]:
    """First on one rank, of which the other learns; then on both."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Trapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(Trap.apply(self.first(x)))

    model = negotiated(Trapped())
    texts = []
    for step in range(8):
        Trap.armed = (step == 2 and rank == 1) or step == 5
        model.zero_grad()
        try:
            model(torch.ones(2, 4)).sum().backward()
        except (ValueError, StrettoError) as exc:
            texts.append(f"{step} {exc}"[:40])
    Trap.armed = False
    return texts


def _refusals(model: Any) -> list[str]:
    texts = []
    for attempt in (
        lambda: model.apply_plan(None),
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: negotiated(net(), nan="raise"),
        lambda: stretto.DistributedDataParallel(net(), order="sorted"),
        lambda: stretto.DistributedDataParallel(net(), plan=None, lanes=3),
    ):
        try:
            attempt()
        except (StrettoError, SpecError) as exc:
            texts.append(str(exc))
    with model.join(), pytest.raises(StrettoError, match=r"join\(\) is not supported"):
        model(torch.ones(2, 12))
    return texts


@pytest.fixture(scope="module")
def like_ddp(tmp_path_factory, rank_servers):
    """What each of two ranks found out beside DDP."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), rank_servers)
    return ranks(_like_ddp, 2, timeout_s=100)


@pytest.mark.parametrize("what", ["steps", "unused", "orders", "checkpoint"])
def test_gradients_are_ddps(like_ddp, what) -> None:
    for one in like_ddp:
        assert all(one[what]), one[what]


@pytest.mark.parametrize("what", ["kept", "state", "copy", "gone"])
def test_what_ddp_promises_holds(like_ddp, what) -> None:
    assert all(one[what] for one in like_ddp)


def test_unsupported_arguments_are_refused_by_name(like_ddp) -> None:
    expected = [
        "apply_plan is not supported",
        "a communication hook is not",
        "nan is not supported",
        "order must be 'static' or 'negotiated'",
        "lanes is for order='negotiated'",
    ]
    for one in like_ddp:
        for text, words in zip(one["refused"], expected, strict=True):
            assert words in text


def test_an_error_in_backward_is_reported_on_the_other_rank(like_ddp) -> None:
    assert like_ddp[0]["error"] == [
        "2 another rank left this step's backward",
        "5 the user's own",
    ]
    assert like_ddp[1]["error"] == ["2 the user's own", "5 the user's own"]


def _gone() -> bool:
    """A module whose wrapper is gone trains alone."""
    module = Forked()
    model = negotiated(module)
    model(torch.ones(2, 6), [0]).sum().backward()
    model = weakref.ref(model)
    gc.collect()
    module.zero_grad()
    module(torch.ones(2, 6), [0]).sum().backward()
    return model() is None and not module.trunk.weight._post_accumulate_grad_hooks


def _asked(name: str, x: torch.Tensor) -> Request:
    return Request(
        name=name, kind=CollectiveKind.ALLREDUCE, dtype="float32", shape=tuple(x.shape)
    )


def _lost(rank: int, size: int) -> dict[str, Any]:
    """Shares of a core while waiting, and what is said when a rank dies."""
    found: dict[str, Any] = {"cpu": []}
    engine = Engine.of_group(dist.group.WORLD, options=EngineOptions(), timeout_s=60.0)
    x = torch.ones(1000)
    for crossed in (False, True):
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        if rank == size - 1:
            # Crossed: all ranks wait, but not for the same.
            early = engine.submit(_asked("other", x), x) if crossed else None
            time.sleep(1.5)
            engine.submit(_asked("x", x), x).wait()
        else:
            early = None
            engine.submit(_asked("x", x), x).wait()
            if crossed:
                early = engine.submit(_asked("other", x), x)
        share = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
        found["cpu"].append(share)
        if early is not None:
            early.wait()
    model = negotiated(Forked())
    for step in range(8):
        if step == 6 and rank == 1:
            os._exit(7)
        begin_s = time.perf_counter()
        try:
            model(torch.randn(4, 6), [0, 1, 2, 3]).square().mean().backward()
        except CommTimeout as exc:
            found["model"] = str(exc)
            break
    handle = None
    try:
        handle = engine.submit(_asked("x", x), x)
        handle.wait(100)
    except CommTimeout as exc:
        found["engine"] = str(exc)
    found["seconds"] = time.perf_counter() - begin_s
    return found


def test_waiting_sleeps_and_a_lost_rank_ends_the_others_with_one_message(ranks) -> None:
    found = ranks(_lost, 3, timeout_s=200, errors=True)
    assert found[1] is None
    for one in (found[0], found[2]):
        assert max(one["cpu"]) < 0.4, one["cpu"]  # 1 if it did not sleep
        assert "rank 1" in one["engine"]
        assert one["seconds"] < 100
        assert "rank 1 is gone (process " in one["model"]


_LEFT_OPEN = """
import torch, torch.distributed as dist
from stretto.runtime.ranks import Ranks
from stretto.runtime.negotiated import Engine, CollectiveKind, Request
engine = Engine(
    Ranks(rank=0, size=1, names=(0,), store=dist.HashStore(), timeout_s=60.0)
)
x = torch.ones(4)
request = Request(name="x", kind=CollectiveKind.ALLREDUCE, dtype="float32", shape=(4,))
engine.submit(request, x).wait()
engine.submit(request, x)
"""


def test_a_program_ends_with_an_engine_left_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def rank_goes_back_twice(rank: int, size: int) -> list[list[Any]]:
    """Gradients after two backwards through one forward, and after two forwards."""
    found = []
    for make in (
        nn.parallel.DistributedDataParallel,
        partial(stretto.DDP, order="negotiated"),
    ):
        torch.manual_seed(0)
        model = make(nn.Linear(3, 1))
        values = []
        for step in range(3):
            x = torch.full((2, 3), 1.0 + rank + step)
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            values += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            losses = [model(x).sum(), model(2 * x).square().sum()]
            for loss in losses:
                loss.backward()
            values += [p.grad.clone() for p in model.parameters()]
        found.append(values)
    return found


def test_a_second_backward_is_as_with_ddp(ranks: Any) -> None:
    for theirs, ours in ranks(rank_goes_back_twice, 2):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


class Twice(nn.Module):
    """One layer under two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def rank_checkpoints_a_layer_twice(rank: int, size: int) -> str:
    model = stretto.DDP(Twice(), order="negotiated")
    with pytest.raises(StrettoError) as error:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return str(error.value)


def test_two_gradients_of_a_parameter_in_one_backward_are_refused(ranks: Any) -> None:
    for message in ranks(rank_checkpoints_a_layer_twice, 2):
        assert "layer.weight" in message or "layer.bias" in message
        assert "order='static'" in message
        assert "use_reentrant=False" in message
