"""Operations on tensors of unusual memory, and on tensors without any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist

LONG = 100_000
"""More than a small collective: sent in the tensor's own memory."""


def inference(rank: int, size: int) -> None:
    """A thread of the engine writes tensors that only inference mode may write."""
    total = float(sum(range(1, size + 1)))
    hvd.init()
    for length in (3, 3, LONG):  # the second time it is sent within a round
        with torch.inference_mode():
            x = torch.ones(length) * (rank + 1)
            assert hvd.allreduce(x, op=hvd.Sum)[0] == total
            assert hvd.allgather(x)[-1] == size
            assert hvd.reducescatter(torch.ones(2 * size), op=hvd.Sum)[0] == size
            hvd.allreduce_(x, op=hvd.Average)
            assert (x == total / size).all()
            several = [torch.ones(length) * (rank + 1), torch.ones(2, 3).t()]
            hvd.grouped_allreduce_(several, op=hvd.Sum)
            assert several[0][0] == total
            assert (several[1] == size).all()
            x = torch.ones(length) * rank
        hvd.broadcast_(x, 1)
        assert x.is_inference()
        assert (x == 1).all()
    result = hvd.allreduce(x, op=hvd.Sum)
    assert not result.is_inference()


def expanded(rank: int, size: int) -> str:
    """Elements that share memory: fine if they get the same value."""
    hvd.init()
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.full((1,), float(rank)).expand(4))
    hvd.broadcast_parameters(model.state_dict(), 1)
    assert model.scale.tolist() == [1.0] * 4
    for length in (3, 3, LONG):
        x = torch.full((2, 1), rank + 1.0).expand(2, length)
        hvd.allreduce_(x, op=hvd.Max)
        assert (x == size).all()
    x = torch.full((1,), float("nan")).expand(3)
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.isnan().all()
    texts = []
    for run in (
        lambda x: hvd.allreduce_(x, op=hvd.Max, name="one"),
        lambda x: hvd.broadcast_(x, 1, name="one"),
        lambda x: hvd.grouped_allreduce_([x, torch.ones(2)], op=hvd.Max),
    ):
        if rank:
            run(torch.arange(3.0))
            continue
        with pytest.raises(hvd.HorovodInternalError) as caught:
            run(torch.zeros(1).expand(3))
        texts.append(str(caught.value))
    goes_on(size)
    return "\n".join(texts)


def expanded_gradients(rank: int, size: int) -> None:
    """Set gradients as a user may."""
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for _ in range(7):
        before = parameter.detach().clone()
        gradient = torch.full((1,), float(rank)).expand(4)
        parameter.grad = torch.arange(4.0) if rank else gradient
        optimizer.step()
        assert torch.equal(before - parameter, torch.arange(4.0) * (size - 1) / size)
    goes_on(size)


def strided(rank: int, size: int) -> None:
    """One element with a stride, and values with a negative bit."""
    hvd.init()
    total = float(sum(range(1, size + 1)))
    column = (torch.arange(3.0)[None] + rank + 1)[:, 0]
    rows = (torch.zeros(0, 8) + rank)[:, ::2]
    minus = torch._neg_view(torch.ones(2 * size) * (rank + 1))
    for x, sign in ((column, 1), (minus, -1), (minus, -1)):
        for op, wanted in ((hvd.Sum, total), (hvd.Max, size if sign > 0 else 1)):
            assert (hvd.allreduce(x, op=op) == sign * wanted).all()
            inside = torch._neg_view(-x) if sign < 0 else x[:1]
            kept = inside.clone()
            hvd.allreduce_(inside, op=op)
            assert (inside == sign * wanted).all()
            inside.copy_(kept)
            got = hvd.reducescatter(x, op=op)
            assert (got == sign * wanted).all()
        assert hvd.allgather(x)[-1] == sign * size
        assert (hvd.broadcast(x, 1) == sign * 2).all()
        length = [len(x)] + [0] * (size - 1)
        received, _ = hvd.alltoall(x, length)
        assert rank or received.unique().tolist() == sorted(
            sign * (r + 1.0) for r in range(size)
        )
    assert hvd.allgather(rows).shape == (0, 4)
    assert hvd.broadcast(rows, 0).shape == (0, 4)
    many = torch._neg_view(torch.ones(LONG) * (rank + 1))
    hvd.allreduce_(many, op=hvd.Min)
    assert (many == -size).all()
    goes_on(size)


def without_memory(rank: int, size: int) -> list[str]:
    hvd.init()
    texts = []
    with FakeTensorMode():
        fake = torch.ones(2)
    for x in (torch.ones(2, device="meta"), fake):
        for run in (
            lambda x: hvd.allreduce(x),
            lambda x: hvd.broadcast_(x, 0),
            lambda x: hvd.allgather(x),
            lambda x: hvd.grouped_allreduce([torch.ones(2), x]),
        ):
            with pytest.raises(ValueError, match=r"device|memory") as caught:
                run(x)
            texts.append(str(caught.value))
    goes_on(size)
    return texts


def goes_on(size: int) -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def test_tensors_made_in_inference_mode(ranks: Ranks) -> None:
    ranks(inference, 2, timeout_s=60)


def test_expanded_tensors_get_results_unless_those_differ(ranks: Ranks) -> None:
    found = ranks(expanded, 2, timeout_s=60)
    assert found[0].count("share memory") == 3
    assert "allreduce 'allreduce.one'" in found[0]
    ranks(expanded_gradients, 2, timeout_s=60)


@pytest.mark.parametrize("size", [2, 3])
def test_strides_of_one_element_and_negative_bits(ranks: Ranks, size: int) -> None:
    ranks(strided, size, timeout_s=60)


def test_tensors_without_memory_are_errors_at_once(ranks: Ranks) -> None:
    found = ranks(without_memory, 2, timeout_s=60)
    assert found[0] == found[1]
    assert "must be one of cpu, cuda, got meta" in found[0][0]
    assert "FakeTensor" in found[0][-1]
