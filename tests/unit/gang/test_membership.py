"""Decisions of a gang, by members in threads of one process."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from stretto.errors import CommTimeout
from stretto.gang.membership import GangMembership, GangStore
from stretto.process_identity import ProcessState
from stretto.runtime.ranks import Ranks


class Processes:
    """Stands for `Presence`: what each rank's process does."""

    def __init__(self):
        self.how = {}
        self.states = {}

    def ended(self, ranks):
        return {rank: self.how[rank] for rank in ranks if rank in self.how}

    def state(self, rank):
        return self.states.get(rank, ProcessState.RUNS)

    def describe(self, rank):
        return f"process of rank {rank}"


class Gang:
    def __init__(self, size, timeout_s=20.0):
        self.processes = Processes()
        self.store = dist.HashStore()
        self.members = [self.member(rank, size, timeout_s) for rank in range(size)]

    def member(self, rank, size, timeout_s):
        ranks = Ranks(
            rank=rank,
            size=size,
            names=tuple(range(size)),
            store=self.store,
            timeout_s=timeout_s,
            presence=self.processes,
        )
        found = GangMembership(GangStore(self.store, ranks, "gang"), ranks)
        found.patience_s = 0.2
        return found

    def all_do(self, call, ranks):
        """What each of these ranks returns from a call, or its error."""
        found = {}

        def run(rank):
            try:
                found[rank] = call(self.members[rank])
            except CommTimeout as exc:
                found[rank] = str(exc)

        threads = [threading.Thread(target=run, args=[rank]) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()
        return found


def test_a_step_ends_for_all_or_for_none():
    gang = Gang(3)
    found = gang.all_do(lambda one: one.end_step(f"of {one.number}"), [0, 1, 2])
    assert found == {0: True, 1: True, 2: True}
    gang.processes.how[1] = "process 7 has ended"
    found = gang.all_do(lambda one: one.end_step(""), [0, 2])
    assert found == {0: False, 2: False}
    for rank in (0, 2):
        assert gang.members[rank].members == (0, 2)
        assert gang.members[rank].lost_in_step == {1}
        assert gang.members[rank].last_notes() == ["of 0"] * 3
    found = gang.all_do(lambda one: one.end_step("again"), [0, 2])
    assert found == {0: True, 2: True}
    assert gang.members[0].lost_in_step == set()
    assert gang.members[2].last_notes() == ["again"] * 2


def test_a_step_that_ended_stays_ended_when_a_member_dies_after_it():
    gang = Gang(2)
    store = gang.members[0].step_store
    store.set("summed/1", "")
    store.compare_set("decision", "", '{"end": true}')
    gang.processes.how[1] = "process 7 has ended"
    assert gang.members[0].end_step("") is True
    assert gang.members[0].members == (0, 1)
    assert gang.members[0].meet("open") is False
    assert gang.members[0].members == (0,)


def test_members_try_again_if_all_of_them_answer_and_end_after_some_times():
    gang = Gang(2)

    def fail(one):
        one.fail(f"lane {one.number}", 0.0)
        return one.members

    for number in range(2):
        assert gang.all_do(fail, [0, 1]) == {0: (0, 1), 1: (0, 1)}
        assert gang.members[0].number == gang.members[0].epoch == number + 1
    for rank, text in gang.all_do(fail, [0, 1]).items():
        assert text.startswith(f"rank {rank}: the sum failed 3 times")
        assert "rank 1: lane 2" in text
        with pytest.raises(CommTimeout):
            gang.members[rank].require_open()


def test_a_silent_member_that_lives_has_the_timeout_and_learns_that_it_is_lost():
    gang = Gang(3, timeout_s=1.0)
    found = gang.all_do(lambda one: one.meet("open"), [0, 1])
    assert found == {0: False, 1: False}
    assert gang.members[0].members == gang.members[1].members == (0, 1)
    found = gang.all_do(lambda one: one.meet("open"), [2])
    assert "rank 2: the gang has removed this rank: no answer in" in found[2]
    assert "process of rank 2" in found[2]
    found = gang.all_do(lambda one: one.end_step(""), [0, 1])
    assert found == {0: True, 1: True}
    assert gang.all_do(lambda one: one.end_step(""), [0, 1]) == found
    late = gang.member(2, 3, 1.0)
    with pytest.raises(CommTimeout, match="removed this rank"):
        late.look()


def test_a_silent_member_of_another_host_is_given_up_after_a_failure():
    gang = Gang(2, timeout_s=100.0)
    gang.processes.states[1] = ProcessState.UNKNOWN
    gang.members[0].fail("connection closed", 0.0)
    assert gang.members[0].members == (0,)


def test_one_member_ends_the_gang_for_all():
    gang = Gang(2)
    found = gang.all_do(
        lambda one: one.give_up("no time") if one is gang.members[0] else one.look(),
        [0],
    )
    assert found == {0: "rank 0: no time"}
    with pytest.raises(CommTimeout, match="rank 1: no time"):
        gang.members[1].look()
