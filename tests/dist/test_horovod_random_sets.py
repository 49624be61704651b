"""Random programs over process sets, against sums in closed form."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

import stretto.horovod.torch as hvd

if TYPE_CHECKING:
    from tests.dist.conftest import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

SEEDS = 5


def rank_of_first_uses(rank: int, size: int) -> int:
    """Use every process set for the first time at once, in an order of this rank's."""
    members = [
        list(ranks)
        for count in range(2, size + 1)
        for ranks in itertools.combinations(range(size), count)
    ]
    given = [hvd.ProcessSet(ranks) for ranks in members[:-1]]
    hvd.init(process_sets=given)
    sets = [s for s in (hvd.global_process_set, *given) if s.included()]
    order = sets[rank % len(sets) :] + sets[: rank % len(sets)]
    if rank % 2:
        order.reverse()
    handles = [
        (
            s,
            hvd.allreduce_async(
                torch.full((3,), rank + 1.0), op=hvd.Sum, process_set=s
            ),
        )
        for s in order
    ]
    for process_set, handle in handles:
        expected = float(sum(r + 1 for r in process_set.ranks or ()))
        assert hvd.synchronize(handle).tolist() == [expected] * 3
    hvd.shutdown()
    return len(handles)


def test_sets_that_are_first_used_at_the_same_moment(ranks: Ranks) -> None:
    # Failed with a deadlock: each engine connected its lanes while it held the store's
    # only client, which another engine of the process needed.
    assert ranks(rank_of_first_uses, 4, timeout_s=200, group_s=150) == [7] * 4


def expected_of(kind: str, members: list[int], own: int, number: int) -> list[float]:
    """Return what an operation gives rank ``own``; rank r brings r + number."""
    values = [float(r + number) for r in members]
    if kind == "sum":
        return [sum(values)] * 4
    if kind == "average":
        return [sum(values) / len(values)] * 4
    if kind == "max":
        return [max(values)] * 4
    if kind == "allgather":
        return [v for v, r in zip(values, members, strict=True) for _ in range(1 + r)]
    if kind == "broadcast":
        return [values[number % len(members)]] * 4
    # all-to-all: one value to each member, marked with the receiver's place
    return [v + 100.0 * members.index(own) for v in values]


def submit(
    kind: str, process_set: hvd.ProcessSet, own: int, number: int
) -> tuple[Any, list[float]]:
    members = list(process_set.ranks or ())
    value, name = float(own + number), f"op{number}"
    full = torch.full((4,), value)
    ops = {"sum": hvd.Sum, "average": hvd.Average, "max": hvd.Max}
    expected = expected_of(kind, members, own, number)
    if kind in ops:
        handle = hvd.allreduce_async(
            full, name=name, op=ops[kind], process_set=process_set
        )
    elif kind == "allgather":
        rows = torch.full((1 + own,), value)
        handle = hvd.allgather_async(rows, name=name, process_set=process_set)
    elif kind == "broadcast":
        root = members[number % len(members)]
        handle = hvd.broadcast_async(full, root, name=name, process_set=process_set)
    else:
        rows = value + 100.0 * torch.arange(len(members))
        handle = hvd.alltoall_async(
            rows, [1] * len(members), name=name, process_set=process_set
        )
    return handle, expected


def rank_of_programs(rank: int, size: int, seed: int) -> int:
    """Run one random program; all ranks draw the same, but submit in own orders."""
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    hvd.init(process_sets="dynamic")
    sets: list[hvd.ProcessSet] = [hvd.global_process_set]
    numbers = itertools.count()
    pending: list[tuple[Any, list[float]]] = []
    checked = 0

    def drain(count: int) -> None:
        nonlocal checked
        own.shuffle(pending)
        for handle, expected in pending[:count]:
            found = hvd.synchronize(handle)
            found = found[0] if isinstance(found, tuple) else found
            assert found.tolist() == pytest.approx(expected), (seed, expected)
            checked += 1
        del pending[:count]

    for _ in range(6):
        action = shared.choice(["add", "add", "remove", "use"])
        if action == "add":
            members = sorted(shared.sample(range(size), shared.randint(1, size)))
            if members not in [s.ranks for s in sets]:
                sets.append(hvd.add_process_set(members))
        elif action == "remove" and len(sets) > 1:
            removed = sets.pop(shared.randrange(1, len(sets)))
            drain(len(pending))  # nothing of the set may be pending
            assert hvd.remove_process_set(removed)
        batch = [
            (shared.choice(KINDS), shared.choice(sets), next(numbers))
            for _ in range(shared.randint(2, 8))
        ]
        own.shuffle(batch)
        for kind, process_set, number in batch:
            if process_set.included():
                pending.append(submit(kind, process_set, rank, number))
        drain(own.randint(0, len(pending)))
    drain(len(pending))
    hvd.shutdown()
    return checked


KINDS = ["sum", "average", "max", "allgather", "broadcast", "alltoall"]


def rank_of_all_programs(rank: int, size: int, first: int) -> list[int]:
    return [rank_of_programs(rank, size, s) for s in range(first, first + SEEDS)]


@pytest.mark.parametrize(("size", "first"), [(3, 0), (4, 100)])
def test_random_programs_over_sets_give_the_closed_form(
    ranks: Ranks, size: int, first: int
) -> None:
    for checked in ranks(rank_of_all_programs, size, first, timeout_s=300, group_s=200):
        assert sum(checked) >= SEEDS * 5
