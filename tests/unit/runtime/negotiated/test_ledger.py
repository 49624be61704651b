"""Simulated ranks in random interleavings: what rounds decide, without a network."""

from __future__ import annotations

import random
from collections import Counter
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import SpecError
from stretto.runtime.negotiated.buckets import LaneLoads, Row, form_buckets
from stretto.runtime.negotiated.ledger import (
    Conflict,
    EndJoin,
    EndStep,
    Launch,
    LaunchMembers,
    RefuseRequest,
    RequestLedger,
)
from stretto.runtime.negotiated.requests import CollectiveKind, Op, Request


def allreduce(name: str, elements: int = 4, **more) -> Request:
    return Request(
        name=name,
        kind=CollectiveKind.ALLREDUCE,
        dtype="float32",
        shape=(elements,),
        **more,
    )


class Simulated:
    """Ranks over a network that takes its time: each enters a round when it likes."""

    def __init__(self, size: int, known_requests: int = 1024) -> None:
        self.ledgers = [
            RequestLedger(
                rank=rank,
                size=size,
                names=range(size),
                known_requests=known_requests,
            )
            for rank in range(size)
        ]
        self.vectors: dict[int, bytes] = {}
        self.log: list = []

    def may_enter(self, rank: int) -> bool:
        return rank not in self.vectors and self.ledgers[rank].wants_round()

    def enter(self, rank: int) -> list | None:
        """Decisions, when this rank was the last to come."""
        self.vectors[rank] = self.ledgers[rank].begin()
        if len(self.vectors) < len(self.ledgers):
            return None
        assert len({len(vector) for vector in self.vectors.values()}) == 1
        agreed = reduce(
            lambda a, b: bytes(x & y for x, y in zip(a, b, strict=True)),
            self.vectors.values(),
        )
        self.vectors = {}
        rooms = {ledger.announces(agreed) for ledger in self.ledgers}
        assert len(rooms) == 1, "ranks disagree on whether descriptions follow"
        announced = None
        if room := rooms.pop():
            announced = [ledger.announcement() for ledger in self.ledgers]
            assert max(map(len, announced)) <= room
        found = [ledger.finish(agreed, announced) for ledger in self.ledgers]
        assert all(decisions == found[0] for decisions in found)
        self.log += found[0]
        return found[0]

    def settle(self, most: int = 50) -> list:
        """Rounds until no rank can continue; the last ones bring nothing."""
        decisions = []
        for _ in range(most):
            waiting = [r for r in range(len(self.ledgers)) if self.may_enter(r)]
            if len(waiting) + len(self.vectors) < len(self.ledgers):
                break
            for rank in waiting:
                decisions += self.enter(rank) or []
        return decisions


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    count=st.integers(1, 12),
    blocks=st.integers(1, 4),
    known=st.sampled_from([1, 3, 1024]),
)
def test_any_order_ends_with_one_launch_order_and_every_element_sent_once(
    seed: int, size: int, count: int, blocks: int, known: int
) -> None:
    chance = random.Random(seed)
    ranks = Simulated(size, known)
    shapes = {f"t{i}": chance.randrange(0, 300) for i in range(count)}
    for block in range(blocks):
        # Shapes may change from block to block, the same on all ranks.
        if chance.random() < 0.3:
            name = chance.choice(list(shapes))
            shapes[name] = chance.randrange(0, 300)
        names = [*list(shapes), f"once {block}"]
        elements = {**shapes, f"once {block}": 7}
        left = [chance.sample(names, len(names)) for _ in range(size)]
        begin = len(ranks.log)
        launched = 0
        while launched < len(names):
            actions = [("submit", r) for r in range(size) if left[r]]
            actions += [("enter", r) for r in range(size) if ranks.may_enter(r)]
            assert actions, "all ranks wait: a deadlock"
            action, rank = chance.choice(actions)
            if action == "submit":
                name = left[rank].pop()
                ranks.ledgers[rank].submit(allreduce(name, elements[name]))
            else:
                launched += len(ranks.enter(rank) or [])
        sent = [decision.name for decision in ranks.log[begin:]]
        assert Counter(sent) == Counter(names)
        _check_units([elements[n] for n in sent], 64 * chance.randrange(1, 20), chance)
    assert not any(ledger.wants_round() for ledger in ranks.ledgers)


def _check_units(elements: list[int], unit_bytes: int, chance: random.Random) -> None:
    rows = [Row(i, f"t{i}", chance.choice("ab"), n, 4) for i, n in enumerate(elements)]
    lanes = chance.randrange(1, 4)
    buckets = form_buckets(rows, unit_bytes, LaneLoads(lanes))
    covered = [0] * len(elements)
    for bucket in buckets:
        members = [rows[position] for position in bucket.parameters]
        assert bucket.tensors == tuple(row.name for row in members)
        assert bucket.elements == sum(row.elements for row in members)
        assert len({row.bucket_key for row in members}) == 1
        # Packed tensors are one slice, and only a tensor alone is cut.
        assert len(bucket.slices) == 1 or len(members) == 1
        at = 0
        for part in bucket.slices:
            assert 0 <= part.lane < lanes
            assert part.start == at
            at = part.end
            assert (part.end - part.start) * 4 <= max(unit_bytes, 4)
        assert at == bucket.elements
        for row in members:
            covered[row.position] += 1
    assert covered == [1] * len(elements)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 4))
def test_what_differs_fails_on_every_rank_and_nothing_else_is_held_up(
    seed: int, size: int
) -> None:
    chance = random.Random(seed)
    ranks = Simulated(size)
    names = [f"t{i}" for i in range(6)]
    for _ in range(3):
        odd = set(chance.sample(names, chance.randrange(3)))
        # On one rank another shape; it is announced whatever was known before.
        who = chance.randrange(size)
        left = [chance.sample(names, len(names)) for _ in range(size)]
        begin = len(ranks.log)
        while len(ranks.log) - begin < len(names):
            actions = [("submit", r) for r in range(size) if left[r]]
            actions += [("enter", r) for r in range(size) if ranks.may_enter(r)]
            assert actions, "all ranks wait: a deadlock"
            action, rank = chance.choice(actions)
            if action == "enter":
                ranks.enter(rank)
                continue
            name = left[rank].pop()
            wrong = name in odd and rank == who
            ranks.ledgers[rank].submit(allreduce(name, 5 if wrong else 4))
        found = {d.name: d for d in ranks.log[begin:]}
        assert {n for n, d in found.items() if isinstance(d, RefuseRequest)} == odd
        for name in odd:
            assert f"rank {who}: [5]" in found[name].reason
        assert not any(ledger.pending for ledger in ranks.ledgers)


DIFFERENT = {
    "shapes": {"shape": (5,)},
    "dtypes": {"dtype": "int32"},
    "reductions": {"op": Op.MAX},
    "prescale factors": {"prescale": 0.5},
    "postscale factors": {"postscale": 0.5},
    "devices": {"device": "cuda"},
    "operations": {"kind": CollectiveKind.BROADCAST},
    "root ranks": {"root": 1},
    "groups": {"group": "g", "group_size": 1},
}


@pytest.mark.parametrize("words", DIFFERENT)
def test_the_reason_names_what_differs_and_which_rank_has_what(words: str) -> None:
    plain = {
        "name": "x",
        "kind": CollectiveKind.ALLREDUCE,
        "dtype": "float32",
        "shape": (4,),
    }
    ranks = Simulated(3)
    for rank, ledger in enumerate(ranks.ledgers):
        more = DIFFERENT[words] if rank == 1 else {}
        ledger.submit(Request(**{**plain, **more}))
    (refused,) = ranks.settle()
    assert isinstance(refused, RefuseRequest)
    assert f"different {words}: ranks 0, 2: " in refused.reason
    assert "; rank 1: " in refused.reason


def test_a_known_name_takes_one_round_and_no_descriptions() -> None:
    ranks = Simulated(3)
    for again in range(3):
        for ledger in ranks.ledgers:
            ledger.submit(allreduce("x"))
        vectors = [ledger.begin() for ledger in ranks.ledgers]
        agreed = reduce(lambda a, b: bytes(map(int.__and__, a, b)), vectors)
        room = ranks.ledgers[0].announces(agreed)
        assert (room > 0) == (again == 0)
        announced = (
            [ledger.announcement() for ledger in ranks.ledgers] if room else None
        )
        for ledger in ranks.ledgers:
            (launch,) = ledger.finish(agreed, announced)
            assert launch.name == "x"


def test_a_name_pending_is_refused_where_it_is_submitted() -> None:
    ranks = Simulated(2)
    ranks.ledgers[1].submit(allreduce("x"))
    with pytest.raises(SpecError, match=r"'x' was submitted on rank 1 while"):
        ranks.ledgers[1].submit(allreduce("x", 9))


def test_a_name_may_come_back_in_a_smaller_group() -> None:
    ranks = Simulated(2)
    for group, names in (("three", "abc"), ("two", "ab")):
        for ledger in ranks.ledgers:
            for name in names:
                ledger.submit(allreduce(name, group=group, group_size=len(names)))
        found = ranks.settle()
        assert [(type(d), d.name) for d in found] == [(Launch, name) for name in names]


def test_a_group_is_launched_whole_or_fails_whole() -> None:
    ranks = Simulated(2)
    group = {"group": "g", "group_size": 2}
    first, second = ranks.ledgers
    for ledger in (first, second):
        ledger.submit(allreduce("alone"))
        ledger.submit(allreduce("a", **group))
    assert [d.name for d in ranks.settle()] == ["alone"]
    for ledger in (first, second):
        ledger.submit(allreduce("b", **group))
    assert [d.name for d in ranks.settle()] == ["a", "b"]
    for ledger, elements in ((first, 4), (second, 5)):
        ledger.submit(allreduce("a", **group))
        ledger.submit(allreduce("b", elements, **group))
    refused = ranks.settle()
    assert sorted(d.name for d in refused) == ["a", "b"]
    assert len({d.reason for d in refused}) == 1
    assert not first.pending


def test_first_dimensions_may_differ_and_are_remembered() -> None:
    ranks = Simulated(2)
    for rows in ((2, 3), (2, 3), (4, 3), (2, 3), (4, 1)):
        for ledger, mine in zip(ranks.ledgers, rows, strict=True):
            ledger.submit(
                Request(name="x", kind=CollectiveKind.ALLGATHER, shape=(4,), rows=mine)
            )
        (launch,) = ranks.settle()
        assert [request.rows for request in launch.by_rank] == list(rows)


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (allreduce("x"), True),
        (allreduce("x", op=Op.AVERAGE), True),
        (allreduce("x", op=Op.MIN), False),
        (Request(name="x", kind=CollectiveKind.ALLGATHER, rows=1), False),
        (Request(name="x", kind=CollectiveKind.BROADCAST, shape=(1,)), False),
        (Request(name="x", kind=CollectiveKind.BARRIER), False),
    ],
)
def test_joined_ranks_add_zeros_to_sums_and_refuse_the_rest(
    request_: Request, may: bool
) -> None:
    ranks = Simulated(3)
    ranks.ledgers[2].join()
    for ledger in ranks.ledgers[:2]:
        ledger.submit(request_)
    (found,) = ranks.settle()
    if may:
        assert isinstance(found, Launch)
        assert found.joined == {2}
    else:
        assert isinstance(found, RefuseRequest)
        assert "joined: 2" in found.reason
    ranks.ledgers[0].join()
    assert not ranks.settle()
    ranks.ledgers[1].join()
    assert ranks.settle() == [EndJoin(last=1)]
    for ledger in ranks.ledgers:
        ledger.submit(request_)
    (found,) = ranks.settle()
    assert isinstance(found, Launch)
    assert not found.joined


def test_a_tensor_sets_members_are_launched_once_and_its_step_ends_once() -> None:
    ranks = Simulated(2)
    members = tuple(allreduce(f"p{i}") for i in range(70))
    for ledger in ranks.ledgers:
        ledger.submit(
            Request(name="set", kind=CollectiveKind.REGISTER, members=members)
        )
    (launch,) = ranks.settle()
    for step in range(3):
        sent: list[int] = []
        chance = random.Random(step)
        left = [chance.sample(range(70), 70) for _ in range(2)]
        end = None
        while end is None:
            rank = chance.randrange(2)
            ledger = ranks.ledgers[rank]
            if left[rank]:
                ledger.submit_member(launch.set_id, left[rank].pop())
                if not left[rank]:
                    ledger.vote(
                        launch.set_id,
                        in_order=rank == 0,
                        whole=True,
                        unused=0b101 if rank else 0b110,
                    )
            if chance.random() < 0.2 or not any(left):
                for decision in ranks.settle(1):
                    if isinstance(decision, LaunchMembers):
                        sent += decision.members
                    else:
                        end = decision
        assert end == EndStep(launch.set_id, False, True, 0b100)
        assert sorted(sent) == list(range(70))
        assert not ranks.settle()


def test_different_sets_name_the_tensor() -> None:
    ranks = Simulated(2)
    for rank, ledger in enumerate(ranks.ledgers):
        members = tuple(allreduce(f"p{i}", 4 + (i == 2) * rank) for i in range(4))
        ledger.submit(
            Request(name="set", kind=CollectiveKind.REGISTER, members=members)
        )
    (refused,) = ranks.settle()
    assert "'p2' of 'set' with different shapes: rank 0: [4]; rank 1: [5]" in (
        refused.reason
    )
    for rank, ledger in enumerate(ranks.ledgers):
        members = tuple(allreduce(f"p{i}") for i in range(4 - rank))
        ledger.submit(
            Request(name="set", kind=CollectiveKind.REGISTER, members=members)
        )
    (refused,) = ranks.settle()
    assert "'p3' exists on rank 0, not on rank 1" in refused.reason


def test_a_name_forgotten_while_it_is_submitted_is_described_again() -> None:
    ranks = Simulated(2, known_requests=1)
    first, second = ranks.ledgers
    for ledger in (first, second):
        ledger.submit(allreduce("a"))
    assert [d.name for d in ranks.settle()] == ["a"]
    for ledger in (first, second):
        ledger.submit(allreduce("b"))
    assert ranks.enter(0) is None
    first.submit(allreduce("a"))  # known still, but not when this round ends
    assert [d.name for d in ranks.enter(1) or []] == ["b"]
    second.submit(allreduce("a"))
    assert [d.name for d in ranks.settle()] == ["a"]


class InSequence:
    """A rank that makes requests and steps of sets one after the other."""

    def __init__(self, ledger: RequestLedger, places: list[str]) -> None:
        self.ledger = ledger
        self.places = list(reversed(places))
        self.sets: dict[str, int] = {}
        self.at = ""
        self.left = 0

    def may_continue(self) -> bool:
        return bool(self.left or (self.places and not self.at))

    def go_on(self) -> None:
        """Submit the next tensor, or begin the next place."""
        if not self.left:
            self.at = self.places.pop()
            if self.at not in self.sets:
                kind = (
                    CollectiveKind.BARRIER
                    if self.at == "pause"
                    else CollectiveKind.REGISTER
                )
                members = (allreduce("a"), allreduce(f"b {self.at}"))
                self.ledger.submit(
                    Request(
                        name=self.at,
                        kind=kind,
                        members=members if kind is CollectiveKind.REGISTER else (),
                        sequence="s",
                    )
                )
                return
            self.left = 2
        self.left -= 1
        number = self.sets[self.at]
        self.ledger.submit_member(number, self.left)
        if not self.left:
            self.ledger.vote(number, in_order=False, whole=True, unused=0)

    def see(self, decisions: list) -> None:
        for decision in decisions:
            if isinstance(decision, Launch) and decision.name == self.at:
                if decision.set_id >= 0:
                    self.sets[self.at] = decision.set_id
                    self.left = 2
                else:
                    self.at = ""
            elif isinstance(decision, EndStep):
                self.at = ""


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 4),
    places=st.lists(st.sampled_from(["x", "y", "pause"]), max_size=6),
    end=st.lists(st.sampled_from(["x", "y", "pause"]), min_size=2, max_size=2),
)
def test_ranks_conflict_where_their_sequences_differ_and_nowhere_else(
    seed: int, size: int, places: list[str], end: list[str]
) -> None:
    chance = random.Random(seed)
    ranks = Simulated(size)
    differs = chance.randrange(size)
    walks = [
        InSequence(ledger, [*places, end[rank == differs]])
        for rank, ledger in enumerate(ranks.ledgers)
    ]
    while True:
        actions = [("continue", r) for r in range(size) if walks[r].may_continue()]
        actions += [("enter", r) for r in range(size) if ranks.may_enter(r)]
        if not actions:
            break
        action, rank = chance.choice(actions)
        if action == "continue":
            walks[rank].go_on()
            continue
        decisions = ranks.enter(rank) or []
        if decisions and isinstance(decisions[-1], Conflict):
            break
        for walk in walks:
            walk.see(decisions)
    if end[0] == end[1]:
        assert not any(walk.at or walk.places for walk in walks)
        return
    assert not any(walk.places for walk in walks)
    assert ranks.log[-1] == Conflict("s")
    at = [ledger.place("s") for ledger in ranks.ledgers]
    texts = {ledger.conflict(at) for ledger in ranks.ledgers}
    (text,) = texts
    assert f"rank {differs}: " in text
