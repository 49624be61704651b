"""Small tensors that ride along with a round: who may, and what comes out."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
import torch

from stretto.runtime.negotiated import CollectiveKind, Handle, Op, Request
from stretto.runtime.negotiated.ledger import Launch, RefuseRequest
from stretto.runtime.negotiated.pending import PendingRequest
from stretto.runtime.negotiated.rounds import PiggybackSlot, wire_bytes

X = Request(name="x", kind=CollectiveKind.ALLREDUCE, dtype="float32", shape=(5,))


def job(request: Request, values: torch.Tensor) -> PendingRequest:
    return PendingRequest(request, values, None, Handle(request.place))


def launch(request: Request, joined: frozenset[int] = frozenset()) -> Launch:
    return Launch(request.name, (request, request), joined)


def with_room(request: Request) -> list[PiggybackSlot]:
    """Two ranks whose last launch was of that request."""
    ranks = [PiggybackSlot(), PiggybackSlot()]
    for slot in ranks:
        slot.execute([launch(request)], {}, 2)
    return ranks


def exchange(ranks: list[PiggybackSlot], loads: list[bytes]) -> None:
    assert {len(load) for load in loads} == {ranks[0].size_bytes}
    rows = numpy.frombuffer(b"".join(loads), dtype=numpy.uint8).reshape(len(loads), -1)
    for slot in ranks:
        slot.unload(rows)


@pytest.mark.parametrize(
    "request_",
    [
        dataclasses.replace(X, kind=CollectiveKind.ALLGATHER),
        dataclasses.replace(X, device="cuda"),
        dataclasses.replace(X, group="g", group_size=2),
        dataclasses.replace(X, shape=(0,)),
        dataclasses.replace(X, shape=(3000,)),
    ],
)
def test_what_may_not_ride(request_: Request) -> None:
    assert wire_bytes(request_) is None


def test_without_a_small_launch_there_is_no_room() -> None:
    slot = PiggybackSlot()
    assert slot.load([(0, "x")], {"x": job(X, torch.ones(5))}) == b""
    slot.execute([launch(dataclasses.replace(X, shape=(3000,)))], {}, 2)
    assert slot.size_bytes == 0
    # Where a rank has joined, none rides: it has nothing to put in.
    slot.execute([launch(X, frozenset({1}))], {}, 2)
    assert slot.size_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "op", "wanted"),
    [
        (torch.float32, Op.SUM, [0, 3, 6, 9, 12]),
        (torch.float16, Op.AVERAGE, [0, 1.5, 3, 4.5, 6]),
        (torch.int16, Op.AVERAGE, [0, 1, 3, 4, 6]),
        (torch.int64, Op.MAX, [0, 2, 4, 6, 8]),
        (torch.int8, Op.PRODUCT, [0, 2, 8, 18, 32]),
    ],
)
def test_what_all_put_in_and_is_launched_ends(
    dtype: torch.dtype, op: Op, wanted: list[float]
) -> None:
    name = str(dtype).removeprefix("torch.")
    request = dataclasses.replace(X, dtype=name, op=op)
    ranks = with_room(request)
    jobs = [
        {"x": job(request, (torch.arange(5) * (rank + 1)).to(dtype))}
        for rank in range(2)
    ]
    loads = [r.load([(3, "x")], j) for r, j in zip(ranks, jobs, strict=True)]
    exchange(ranks, loads)
    for slot, mine in zip(ranks, jobs, strict=True):
        rest, ended = slot.execute([launch(request)], mine, 2)
        assert rest == []
        assert ended is mine["x"]
        result = mine["x"].handle.wait(0)
        assert result.dtype is dtype
        assert result.tolist() == wanted


def test_different_ones_are_sent_as_if_none_had_ridden() -> None:
    ranks = with_room(X)
    other = dataclasses.replace(X, name="y")
    jobs = {"x": job(X, torch.ones(5)), "y": job(other, torch.ones(5))}
    loads = [ranks[0].load([(3, "x")], jobs), ranks[1].load([(4, "y")], jobs)]
    exchange(ranks, loads)
    decisions = [launch(X), launch(other)]
    for slot in ranks:
        assert slot.execute(decisions, jobs, 2) == (decisions, None)
    # A rank that has nothing to put in.
    loads = [ranks[0].load([(3, "x")], jobs), ranks[1].load([], {})]
    exchange(ranks, loads)
    assert ranks[1].execute([launch(X)], {}, 2) == ([launch(X)], None)
    assert ranks[0].execute([launch(X)], jobs, 2) == ([launch(X)], None)
    assert not jobs["x"].handle.poll()


def test_what_is_refused_or_not_launched_does_not_end() -> None:
    ranks = with_room(X)
    for decisions in ([RefuseRequest("x", "why")], []):
        jobs = {"x": job(X, torch.ones(5))}
        exchange(ranks, [slot.load([(3, "x")], jobs) for slot in ranks])
        for slot in ranks:
            assert slot.execute(decisions, jobs, 2) == (decisions, None)
        assert not jobs["x"].handle.poll()
        for slot in ranks:
            slot.execute([launch(X)], {}, 2)
