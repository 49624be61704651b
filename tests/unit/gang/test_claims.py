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


@pytest.fixture
def overdue():
    """Two ranks and the clock: a third has claimed 0 and is dead, 1 is finished."""
    clock = Clock()
    dead, one, two = claims_of(3, 2, clock)
    dead.claim()
    one.claim()
    one.finish(1)
    assert [one.claim(), two.claim()] == [None, None]  # time counts from here
    return one, two, clock


def test_what_a_dead_rank_has_is_not_claimed_before_it_is_overdue(overdue):
    one, _, _ = overdue
    assert one.claim_overdue(5.0) is None


def test_what_is_overdue_is_claimed_by_one_rank_and_later_by_another(overdue):
    one, two, clock = overdue
    clock.now_s = 6.0
    assert one.claim_overdue(5.0) == 0
    assert two.claim_overdue(5.0) is None  # one has it
    clock.now_s = 11.0
    assert two.claim_overdue(5.0) == 0  # one did not finish it either


def test_the_first_result_of_what_was_overdue_counts(overdue):
    one, two, clock = overdue
    clock.now_s = 6.0
    one.claim_overdue(5.0)
    clock.now_s = 11.0
    two.claim_overdue(5.0)
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


@pytest.fixture
def lost():
    """Two ranks that know that a third is lost: it had finished 0 and claimed 2."""
    dead, one, two = claims_of(3, 4)
    assert [dead.claim(), one.claim(), dead.claim(), two.claim()] == [0, 1, 2, 3]
    dead.finish(0)
    one.finish(1)
    two.finish(3)
    one.lose({0})
    two.lose({0})
    return one, two


def test_what_a_lost_rank_has_claimed_is_claimed_again_at_once(lost):
    one, two = lost
    assert one.claim() == 0  # its result is lost with it
    assert two.claim() == 2  # it did not finish this one
    assert one.claim() is None
    assert two.claim() is None


def test_a_step_is_complete_once_what_a_lost_rank_had_is_finished(lost):
    one, two = lost
    one.claim()
    two.claim()
    assert one.finish(0)
    assert not one.is_complete
    assert two.finish(2)
    assert one.is_complete
    assert two.is_complete


def test_a_lost_rank_that_continues_changes_nothing():
    stopped, one, two = claims_of(3, 2)
    assert [stopped.claim(), one.claim()] == [0, 1]
    assert one.finish(1)
    one.lose({0})
    two.lose({0})
    assert two.claim() == 0
    assert stopped.finish(0)  # its own view; no sum has it
    assert not one.is_complete
    assert two.finish(0)
    assert one.is_complete
    assert not stopped.finish(1)


def test_a_returned_claim_that_its_next_rank_loses_too_is_returned_again():
    first, second, third = claims_of(3, 1)
    assert first.claim() == 0
    second.lose({0})
    third.lose({0})
    assert second.claim() == 0
    assert third.claim() is None
    third.lose({1})
    assert third.claim() == 0
    assert third.finish(0)
    assert third.is_complete


def test_a_rank_may_learn_of_two_losses_at_once():
    one, two, three, four = claims_of(4, 3)
    assert [one.claim(), two.claim(), three.claim()] == [0, 1, 2]
    three.lose({0})
    assert three.finish(2)
    assert three.claim() == 0
    three.lose({1})
    four.lose({0, 1})
    assert four.claim() == 1
    assert four.claim() is None  # three computes the other one
    assert three.finish(0)
    assert four.finish(1)
    assert three.is_complete
    assert four.is_complete


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_remain_have_each_micro_batch_once_for_any_losses(seed):
    rng = random.Random(seed)
    clock, count, size = Clock(), rng.randrange(1, 12), rng.randrange(2, 6)
    ranks = claims_of(size, count, clock)
    losses, seen = [], [0] * size
    gone, silent = set(), set()
    counted = [set() for _ in ranks]
    busy: list[int | None] = [None] * size

    def act(rank):
        one = ranks[rank]
        if rank not in gone and seen[rank] < len(losses) and rng.random() < 0.5:
            one.lose({losses[seen[rank]]})
            seen[rank] += 1
        elif busy[rank] is None:
            busy[rank] = one.claim()
            if busy[rank] is None:
                busy[rank] = one.claim_overdue(5.0)
        elif rng.random() < 0.5:
            if one.finish(busy[rank]):
                assert busy[rank] not in counted[rank]
                counted[rank].add(busy[rank])
            busy[rank] = None

    for _ in range(5000):
        clock.now_s += rng.random()
        living = [r for r in range(size) if r not in silent]
        act(rng.choice(living))
        left = [r for r in range(size) if r not in gone]
        if len(left) > 1 and rng.random() < 0.02:
            lost = rng.choice(left)
            losses.append(lost)
            gone.add(lost)
            if rng.random() < 0.5:  # others are only given up, and continue
                silent.add(lost)
        elif all(
            seen[r] == len(losses) and busy[r] is None and ranks[r].is_complete
            for r in left
        ):
            break
    else:
        pytest.fail("the step did not end")
    assert sorted(i for r in left for i in counted[r]) == list(range(count))


def test_assigned_micro_batches_stay_with_their_ranks_until_one_is_lost():
    clock = Clock()
    one, two = claims_of(2, 3, clock)
    for rank in (one, two):
        rank.assign({0: 0, 1: 1, 2: 0})
    assert two.claim() is None
    assert two.finish(1)
    clock.now_s = 100.0
    assert two.claim_overdue(5.0) is None
    two.lose({0})
    assert sorted([two.claim(), two.claim()]) == [0, 2]
