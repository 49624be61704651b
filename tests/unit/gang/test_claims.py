"""Claims of one step, by several ranks in one process."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from stretto.gang.claims import Claims


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def claims_of(ranks, count, now=None):
    store = dist.HashStore()
    clock = now or Clock()
    return [Claims(store, rank=r, count=count, now=clock) for r in range(ranks)]


@pytest.mark.parametrize("seed", range(20))
def test_each_micro_batch_is_claimed_once_in_any_order_of_ranks(seed):
    rng = random.Random(seed)
    count = rng.randrange(1, 40)
    ranks = claims_of(rng.randrange(1, 5), count)
    done = []
    while not all(one.all_claimed for one in ranks):
        one = rng.choice(ranks)
        index = one.claim()
        if index is not None:
            assert one.finish(index)
            done.append(index)
    assert sorted(done) == list(range(count))
    assert all(one.is_complete for one in ranks)


def test_the_first_result_counts_and_the_second_is_dropped():
    slow, fast = claims_of(2, 1)
    assert slow.claim() == 0
    assert fast.claim() is None
    assert fast.finish(0)
    assert not slow.finish(0)
    assert slow.finished == fast.finished == 1


def test_what_is_overdue_is_claimed_by_one_rank_and_later_by_another():
    clock = Clock()
    dead, one, two = claims_of(3, 2, clock)
    assert dead.claim() == 0
    assert one.claim() == 1
    assert one.finish(1)
    assert one.claim() is None
    assert two.claim() is None
    assert one.claim_overdue(5.0) is None
    clock.now_s = 6.0
    assert one.claim_overdue(5.0) == 0
    assert two.claim_overdue(5.0) is None  # one has it
    clock.now_s = 11.0
    assert two.claim_overdue(5.0) == 0  # one did not finish it either
    assert two.finish(0)
    assert not one.finish(0)
    clock.now_s = 99.0
    assert one.claim_overdue(5.0) is None
    assert one.is_complete


def test_removed_keys_begin_again():
    (one,) = claims_of(1, 2)
    one.claim()
    one.finish(0)
    one.remove()
    (again,) = [Claims(one._store, rank=0, count=2)]
    assert again.finished == 0
    assert again.claim() == 0
