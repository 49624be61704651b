"""`DistributedOptimizer` against the average that a single process computes."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 2))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def _reference(
    size: int, steps: int, *, passes: int = 1, divisor: float | None = None
) -> list[torch.Tensor]:
    """What one process gets that sums gradients of all ranks' batches."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            for i in range(passes):
                loss = _loss(model, _batch(rank, step * passes + i))
                (loss / (divisor or size)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _trained(steps: int, **options: Any) -> list[torch.Tensor]:
    model = _model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes = options.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            _loss(model, _batch(hvd.rank(), step * passes + i)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _close(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-6):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def _trains(rank: int, size: int) -> None:
    hvd.init()
    want = _reference(size, 8)
    _close(_trained(8), want)
    _close(_trained(8, num_groups=2), want)
    model = _model()
    first = list(model.parameters())[:3]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), groups=[first]
    )
    for step in range(8):
        _loss(model, _batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _close([p.detach() for p in model.parameters()], want)
    _close(_trained(8, gradient_predivide_factor=2.0), want)
    _close(_trained(8, op=hvd.Sum), _reference(size, 8, divisor=1.0))
    _close(_trained(8, compression=hvd.Compression.fp16), want, 5e-3)
    _close(_trained(6, backward_passes_per_step=2), _reference(size, 6, passes=2), 1e-6)
    _close(_trained(3, compression=_Doubled), _reference(size, 3))
    _several_optimizers(rank, size)
    _unused(rank, size)
    _changing_needs(rank, size)
    _sparse(rank, size)
    _sparse_adam(rank, size)
    _process_sets(rank, size)
    hvd.shutdown()


class _Doubled:
    """A user's own compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double().reshape(-1), tensor

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx.dtype).reshape(ctx.shape)


def _several_optimizers(rank: int, size: int) -> None:
    """Two models with the same names, both under way at once."""
    models = [_model(), _model()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        for m in models
    ]
    for step in range(6):
        sum(_loss(m, _batch(rank, step)) for m in models).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for model in models:
        _close([p.detach() for p in model.parameters()], _reference(size, 6))


def _stepped(optimizer: Any, model: nn.Module, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    _loss(model, batch).backward()
    optimizer.step()


def _uneven_optimizers(rank: int, size: int) -> None:
    """Some are made on one rank only, and some names are equal."""

    def made(model: nn.Module) -> Any:
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
        )

    hvd.init()
    kept = [made(_model()) for _ in range(rank)]  # never used
    for again in (False, True):
        models = [_model(), _model(), nn.Linear(6, 2)]
        torch.nn.init.constant_(models[2].weight, 0.1)
        torch.nn.init.zeros_(models[2].bias)
        optimizers = [made(model) for model in models]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            # The last has names of its own, so it may be used at any time.
            for i in (2, 0, 1) if rank else (0, 1, 2):
                _loss(models[i], _batch(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
        for i in (0, 1):
            _close([p.detach() for p in models[i].parameters()], _reference(size, 5))
        if not again:  # an error on one rank while it built something
            kept += [made(_model()) for _ in range(2 - rank)]
            hvd.shutdown()
            hvd.init()
            # The same optimizers take part in the new job.
            _stepped(optimizers[1], models[1], _batch(rank, 9))
            if rank == 1:
                kept.append(made(_model()))
    assert len(kept) > 0

    # Used in different orders: an error, not a mix of two models.
    models = [_model(), _model()]
    optimizers = [made(model) for model in models]
    first = rank % 2
    optimizers[first].zero_grad()
    _loss(models[first], _batch(rank, 0)).backward()
    optimizers[first].step()
    _loss(models[1 - first], _batch(rank, 0)).backward()
    with pytest.raises(hvd.HorovodInternalError, match="in order of creation"):
        optimizers[1 - first].step()
    hvd.shutdown()


def _unused(rank: int, size: int) -> None:
    """What has no gradient on a rank, or on all, counts as zeros."""
    torch.manual_seed(1)
    parts = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=0.1))
    for _ in range(6):
        optimizer.zero_grad()
        parts[rank % 2](torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        for i in range(2):
            share = len(range(i, size, 2)) / size
            assert torch.allclose(parts[i].bias.grad, torch.full((3,), share))
        assert torch.equal(parts[2].weight.grad, torch.zeros(3, 3))
        with optimizer.skip_synchronize():
            optimizer.step()


def _changing_needs(rank: int, size: int) -> None:
    """Parameters that are frozen for a while, from the start, or added later."""
    model = _model()
    late = list(model[0].parameters())
    for p in late:
        p.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0),
        named_parameters=model.named_parameters(),
    )
    added = nn.Parameter(torch.ones(2))
    for step in range(9):
        if step == 3:
            for p in late:
                p.requires_grad_(True)
        if step == 5:
            optimizer.add_param_group({"params": [added]})
        model[3].bias.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        (_loss(model, _batch(rank, step)) + rank * added.sum()).backward()
        optimizer.step()
        same = hvd.allgather_object([p.detach() for p in model.parameters()])
        assert all(
            torch.equal(a, b)
            for theirs in same
            for a, b in zip(theirs, same[0], strict=True)
        )
    torch.testing.assert_close(
        added.detach(), torch.full((2,), 1.0 - 4 * 0.1 * (size - 1) / 2)
    )


def _sparse(rank: int, size: int) -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 3, sparse=True)
        head = nn.Linear(3, 1)
        whole = nn.Sequential(embedding, head)
        twin = copy.deepcopy(whole)
        sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, sparse_as_dense=as_dense)
        reference = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(5):
            for r in range(size):
                (twin(torch.tensor([r, r + 1, step])).sum() / size).backward()
            whole(torch.tensor([rank, rank + 1, step])).sum().backward()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        _close(
            [p.data for p in whole.parameters()], [p.data for p in twin.parameters()]
        )


def _sparse_adam(rank: int, size: int) -> None:
    """SparseAdam takes only sparse gradients, also of a table that a rank skips."""
    for as_dense in (True, False):
        torch.manual_seed(0)
        tables = nn.ModuleList(nn.Embedding(10, 3, sparse=True) for _ in range(2))
        twin = copy.deepcopy(tables)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(tables.parameters()), lr=0.1),
            named_parameters=tables.named_parameters(),
            sparse_as_dense=as_dense,
        )
        reference = torch.optim.SparseAdam(list(twin.parameters()), lr=0.1)
        for step in range(4):
            for r in range(size):
                (_looked_up(twin, r, step, skips=as_dense) / size).backward()
            _looked_up(tables, rank, step, skips=as_dense).backward()
            optimizer.synchronize()
            for table in tables:
                assert table.weight.grad is not None
                assert table.weight.grad.is_sparse
                assert table.weight.grad.sparse_dim() == 1
            with optimizer.skip_synchronize():
                optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        _close(
            [p.data for p in tables.parameters()], [p.data for p in twin.parameters()]
        )


def _looked_up(
    tables: nn.ModuleList, rank: int, step: int, *, skips: bool
) -> torch.Tensor:
    rows = torch.tensor([rank, rank + 1, step])
    loss = (tables[0](rows) ** 2).sum()
    # In every step another rank uses only the first table.
    if not skips or rank != step % 2:
        loss = loss + (tables[1](rows + 2) ** 2).sum()
    return loss


def _process_sets(rank: int, size: int) -> None:
    evens = list(range(0, size, 2))
    hvd.shutdown()
    group = hvd.ProcessSet(evens)
    hvd.init(process_sets=[group])
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, process_set=group)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * rank).sum().backward()
        optimizer.step()
    step = sum(evens) / len(evens) if rank in evens else float(rank)
    assert model.weight.item() == pytest.approx(-5 * step)


def _protests(rank: int, size: int) -> None:
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for named, text in (
        ([*net.named_parameters(), ("bias", net.weight)], "bias more than once"),
        (list(net.named_parameters())[:1], "lacks 1 of the optimizer's 2"),
        (list(net.parameters()), "pairs of name and parameter"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd, named_parameters=named)
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(sgd)
    hvd.init()
    with pytest.raises(NotImplementedError, match="Average"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="each in at most one group"):
        hvd.DistributedOptimizer(sgd, groups=[[nn.Parameter(torch.ones(1))]])

    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert set(optimizer._parameter_names.values()) == {"weight", "bias"}
    batch = torch.ones(1, 2)
    net(batch).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step = 1"):
        net(batch).sum().backward()
    optimizer.synchronize()
    before = net.weight.grad.norm()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert net.weight.grad.norm() < before
    net(batch).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        net(batch).sum().backward()
    optimizer.step()
    assert torch.equal(net.bias.grad, torch.full((2,), 2.0))
    optimizer.set_backward_passes_per_step(1)

    # A closure's gradients are reduced, too.
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(batch * (rank + 1)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(net.weight.grad, torch.full((2, 2), (size + 1) / 2))

    # A gradient scaler, and a scheduler made before the optimizer was distributed.
    net = nn.Linear(2, 2)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(batch * (rank + 1)).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        want = torch.full((2, 2), (size + 1) / 2)
        assert torch.allclose(net.weight.grad, want), step
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)

    # Nothing holds an optimizer that is released; its model stays usable.
    gone = weakref.ref(optimizer._reducer)
    del optimizer, plain, schedule, scaler
    gc.collect()
    assert gone() is None
    net(batch).sum().backward()

    # A rank that has fewer batches joins the others' later steps with zeros.
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    for step in range(6 + 3 * rank):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step >= 6:
            active = sum(6 + 3 * r > step for r in range(size))
            assert net.weight.grad.item() == pytest.approx(active / size)
    assert hvd.join() == size - 1

    # So does one that has none at all, with which nothing can be registered.
    net = nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in range(3 * rank):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert net.weight.grad.item() == pytest.approx(rank / size)
    assert hvd.join() == size - 1

    # Different models fail on every rank.
    other = nn.Linear(2, 2 + rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    other(batch).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="different shapes"):
        optimizer.step()
    hvd.shutdown()


def test_steps_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(_trains, 2, timeout_s=120)
    ranks(_trains, 4, timeout_s=180)


def test_optimizers_of_some_ranks_only(ranks: Ranks) -> None:
    ranks(_uneven_optimizers, 2, timeout_s=120)


def test_wrong_use_is_reported_and_common_use_works(ranks: Ranks) -> None:
    ranks(_protests, 2, timeout_s=120)
