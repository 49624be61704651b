"""Parameters, optimizer state, objects and batch statistics over ranks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist

_OPTIONS = {
    "lr": (0.25, 0.5),
    "momentum": (0.8, 0.9),
    "nesterov": (True, False),
    "weight_decay": (0.2, 0.1),
    "betas": ((0.9, 0.999), (0.8, 0.9)),
    "etas": ((0.8, 2.4), (0.25, 1.75)),
    "step_sizes": ((1e-5, 100), (1e-7, 5)),
    "amsgrad": (True, False),
}


def _classes() -> list[type[torch.optim.Optimizer]]:
    found = {
        cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    }
    found -= {torch.optim.Optimizer, torch.optim.LBFGS}
    return sorted(found, key=lambda cls: cls.__name__)


def _optimizer(
    cls: type[torch.optim.Optimizer], which: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(which)
    only_matrices = cls.__name__ == "Muon"
    sparse = cls is torch.optim.SparseAdam
    model: nn.Module = (
        nn.Embedding(5, 3, sparse=True)
        if sparse
        else nn.Linear(5, 3, bias=not only_matrices)
    )
    known = inspect.signature(cls.__init__).parameters
    options: dict[str, Any] = {
        name: values[which] for name, values in _OPTIONS.items() if name in known
    }
    return model, cls(model.parameters(), **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    batch = (
        torch.tensor([0, rank]) if isinstance(model, nn.Embedding) else torch.ones(2, 5)
    )
    (model(batch) ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(rank: int, size: int) -> list[str]:
    hvd.init()
    classes = _classes()
    for cls in classes:
        model, plain = _optimizer(cls, min(rank, 1))
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        root = size - 1
        for _ in range(2):
            _step(model, optimizer, rank)
        # As after a restart: only the root loads what was saved.
        saved = model.state_dict(), optimizer.state_dict()
        model, plain = _optimizer(cls, min(rank, 1))
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        if rank == root:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        before = optimizer.state_dict()
        options = {**optimizer.param_groups[0], "params": None}
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        after = optimizer.state_dict()
        if rank == root:
            assert str(after) == str(before), cls
        found = {**optimizer.param_groups[0], "params": None}
        wanted = hvd.broadcast_object(options, root)
        assert found == wanted, cls
        assert {k: type(v) for k, v in found.items()} == {
            k: type(v) for k, v in wanted.items()
        }, cls
        texts = hvd.allgather_object(str([after, list(model.state_dict().items())]))
        assert len(set(texts)) == 1, cls
        assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
        _step(model, optimizer, 0)

    # State that exists nowhere; parameters that need no gradient.
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5 + rank, weight_decay=0.1)
    kept = model.weight.detach().clone()
    hvd.broadcast_optimizer_state(sgd, root_rank=0)
    assert sgd.param_groups[0]["lr"] == 0.5
    assert torch.equal(model.weight, kept)
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))
    assert model.bias.grad is None

    # A scheduler of the optimizer that was wrapped afterward.
    sgd = torch.optim.SGD(model.parameters(), lr=1.0 + rank)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    wrapped = hvd.DistributedOptimizer(sgd, model.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, root_rank=1)
    wrapped.step()
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 1.0

    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    uneven = torch.optim.SGD(list(model.parameters())[: 1 + rank % 2], lr=0.1)
    with pytest.raises(ValueError, match="different numbers of parameters"):
        hvd.broadcast_optimizer_state(uneven, 0)
    _parameters_and_objects(rank, size)
    _batch_norm(rank, size)
    hvd.shutdown()
    return [cls.__name__ for cls in classes]


def _parameters_and_objects(rank: int, size: int) -> None:
    for kind in (
        lambda m: m.state_dict(),
        lambda m: list(m.named_parameters()),
        lambda m: m.named_parameters(),
        lambda m: list(m.parameters()),
    ):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, float(rank))
        nn.init.constant_(model.bias, float(rank))
        hvd.broadcast_parameters(kind(model), root_rank=1)
        assert torch.equal(model.weight, torch.ones(2, 2))
        assert model.weight.requires_grad
    for wrong in (3, "weights", {"a": 3}):
        with pytest.raises(ValueError, match="params must"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    thing = {"hello": 123, 0: [rank, {1, 2}]}
    assert hvd.broadcast_object(thing, root_rank=1) == {"hello": 123, 0: [1, {1, 2}]}
    assert hvd.broadcast_object("a" * (rank + 1), name="text") == "a"
    assert hvd.allgather_object({rank: "x" * rank}) == [
        {r: "x" * r} for r in range(size)
    ]


def _batch_norm(rank: int, size: int) -> None:
    torch.manual_seed(5)
    rows = [2 + r for r in range(size)]
    for shape, options in (
        ((4,), {}),
        ((4, 3), {"momentum": None}),
        ((4, 3, 2), {"affine": False}),
        ((4, 2), {"track_running_stats": False}),
    ):
        whole = torch.randn(sum(rows), *shape, dtype=torch.float64) * 3 + 100
        weights = torch.randn_like(whole)
        mine = whole.split(rows)[rank].clone().requires_grad_()
        all_of_it = whole.clone().requires_grad_()
        ours = hvd.SyncBatchNorm(4, **options).double()
        kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
        theirs = kinds[whole.dim()](4, **options).double()
        if ours.affine:
            for layer in (ours, theirs):
                nn.init.constant_(layer.weight, 1.5)
                nn.init.constant_(layer.bias, -0.5)
        for _ in range(2):
            ours.zero_grad()
            mine.grad = all_of_it.grad = None
            out = ours(mine)
            want = theirs(all_of_it)
            torch.testing.assert_close(out, want.split(rows)[rank])
            (out * weights.split(rows)[rank]).sum().backward()
            theirs.zero_grad()
            (want * weights).sum().backward()
            torch.testing.assert_close(mine.grad, all_of_it.grad.split(rows)[rank])
        if ours.affine:
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                total = hvd.allreduce(a.grad, op=hvd.Sum)
                torch.testing.assert_close(total, b.grad)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        ours.eval()
        theirs.eval()
        torch.testing.assert_close(ours(whole), theirs(whole))
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(4)(torch.ones(4))


def test_state_of_every_optimizer_objects_and_batch_statistics(ranks: Ranks) -> None:
    names = ranks(_state, 2, timeout_s=120)[0]
    assert {"SGD", "Adam", "Rprop", "SparseAdam", "ASGD"} <= set(names)


def _hook_calls(rank: int, size: int, how: str) -> int:
    hvd.init()
    model = nn.Linear(5, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    if how == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    elif how == "loaded":
        optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        _step(model, optimizer, rank)
    hvd.shutdown()
    return len(calls)


@pytest.mark.parametrize("how", ["new", "broadcast", "loaded"])
def test_hooks_of_a_step_run_once_on_each_rank(ranks: Ranks, how: str) -> None:
    assert ranks(_hook_calls, 2, how) == [3, 3]
