"""Process sets, static and dynamic."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist


def within(rank: int, size: int, own: hvd.ProcessSet, members: list[int]) -> None:
    """Every operation among a set's ranks."""
    count = len(members)
    place = members.index(rank)
    total = float(sum(members))

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, float(value))

    mine = full(rank, 3)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, process_set=own), full(total, 3))
    assert torch.equal(hvd.allreduce(mine, process_set=own), full(total / count, 3))
    for found in hvd.grouped_allreduce([mine, mine], op=hvd.Max, process_set=own):
        assert torch.equal(found, full(max(members), 3))
    gathered = hvd.allgather(full(rank, 1), process_set=own)
    assert gathered.tolist() == members
    gathered = hvd.grouped_allgather([full(rank, 1)] * 2, process_set=own)
    assert [g.tolist() for g in gathered] == [members] * 2
    # Roots are global ranks.
    assert torch.equal(
        hvd.broadcast(mine, members[-1], process_set=own), full(members[-1], 3)
    )
    parts = torch.arange(count) + 10.0 * rank
    received, counts = hvd.alltoall(parts, [1] * count, process_set=own)
    assert received.tolist() == [10.0 * m + place for m in members]
    assert counts.tolist() == [1] * count
    assert torch.equal(
        hvd.reducescatter(full(rank, count, 2), op=hvd.Sum, process_set=own),
        full(total, 1, 2),
    )
    placed = full(rank, 3)
    hvd.allreduce_(placed, op=hvd.Min, process_set=own)
    assert torch.equal(placed, full(min(members), 3))
    coordinates = torch.tensor([[place]])
    entries = torch.sparse_coo_tensor(
        coordinates, full(rank, 1), (count,), check_invariants=True
    )
    wait = hvd.sparse_allreduce_async(entries, "s", hvd.Average, process_set=own)
    assert wait().to_dense().tolist() == [m / count for m in members]
    hvd.barrier(process_set=own)
    tensor = full(1, 2).requires_grad_()
    hvd.allreduce(tensor, op=hvd.Sum, process_set=own).sum().backward()
    assert torch.equal(tensor.grad, full(count, 2))
    tensor = full(1, 2).requires_grad_()
    hvd.allgather(tensor, process_set=own).sum().backward()
    assert torch.equal(tensor.grad, full(1, 2))
    tensor = full(1, 2).requires_grad_()
    hvd.broadcast(tensor, members[0], process_set=own).sum().backward()
    assert torch.equal(tensor.grad, full(place == 0, 2))
    tensor = full(1, count).requires_grad_()
    hvd.reducescatter(tensor, op=hvd.Sum, process_set=own).sum().backward()
    assert torch.equal(tensor.grad, full(count, count))
    if count < size:
        outside = next(r for r in range(size) if r not in members)
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(mine, outside, process_set=own)


def static(rank: int, size: int) -> None:
    warnings.simplefilter("error")
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.size() is None
    assert even.rank() is None
    assert even.included() is None
    for _ in range(2):  # also after shutdown and init
        hvd.init(process_sets=[even, odd])
        assert [hvd.global_process_set.process_set_id, even.process_set_id] == [0, 1]
        assert odd.process_set_id == 2
        own, other = (odd, even) if rank % 2 else (even, odd)
        members = list(range(rank % 2, size, 2))
        assert own.ranks == members
        assert own.size() == len(members)
        assert own.rank() == members.index(rank)
        assert own.included() is True
        assert other.included() is False
        assert other.rank() is None
        within(rank, size, own, members)
        within(rank, size, hvd.global_process_set, list(range(size)))
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(torch.ones(2), process_set=other)
        with pytest.raises(ValueError, match="not in"):
            hvd.barrier(process_set=other)
        # What ranks of a set disagree on does not touch the others'.
        if rank % 2 == 0 and len(members) > 1:
            with pytest.raises(hvd.HorovodInternalError, match="shapes"):
                hvd.allreduce(torch.ones(2 + rank), process_set=even)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.shutdown()
        assert even.process_set_id is None
        assert odd.included() is None


def dynamic(rank: int, size: int) -> Any:
    warnings.simplefilter("error")
    hvd.init(process_sets="dynamic")
    first = hvd.add_process_set([size - 1, 0])
    assert first.process_set_id == 1
    assert first.ranks == [0, size - 1]
    if first.included():
        within(rank, size, first, [0, size - 1])
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(first.ranks)
    with pytest.raises(ValueError, match="below"):
        hvd.add_process_set([0, size])
    with pytest.raises(ValueError, match="at least one"):
        hvd.add_process_set([])
    second = hvd.add_process_set(hvd.ProcessSet([1]))
    assert second.process_set_id == 2
    if rank == 1:
        within(rank, size, second, [1])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(first) is True
    assert first.process_set_id is None
    assert hvd.remove_process_set(first) is False
    with pytest.raises(ValueError, match="not added"):
        hvd.allreduce(torch.ones(2), process_set=first)
    again = hvd.add_process_set([0, size - 1])
    assert again.process_set_id == 3
    if again.included():
        within(rank, size, again, [0, size - 1])
    try:
        hvd.add_process_set([rank])
    except hvd.HorovodInternalError as exc:
        text = str(exc)
    hvd.shutdown()
    return text


def both(rank: int, size: int) -> Any:
    static(rank, size)
    return dynamic(rank, size)


def test_sets_of_one_rank_each(ranks: Ranks) -> None:
    ranks(static, 2)


def test_operations_among_the_ranks_of_a_set(ranks: Ranks) -> None:
    texts = ranks(both, 4, timeout_s=100)
    assert len(set(texts)) == 1
    assert "[2]" in texts[0]
