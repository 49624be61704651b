"""Views of a job with several keepers, through losses, doubles, delays and splits."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stretto.members.ballots import (
    Accept,
    Accepted,
    Deliver,
    KeeperCore,
    Message,
    Prepare,
    Promise,
    Send,
    VotePolicy,
    all_hearing,
)
from stretto.members.view import Member, View

TICK_S = 0.1


@dataclass
class Host:
    core: KeeperCore
    alive: set[int] = field(default_factory=set)
    delivered: list[View] = field(default_factory=list)


class World:
    """Keepers, their ranks, and a network that does what a test asks of it."""

    def __init__(self, ranks: list[int], policy: VotePolicy | None = None) -> None:
        self.policy = policy or VotePolicy()
        self.now_s = 0.0
        members, number = [], 0
        for keeper, count in enumerate(ranks):
            for _ in range(count):
                members.append(Member(id=number, keeper=keeper))
                number += 1
        self.next_id = number
        first = View(generation=0, members=tuple(members))
        keepers = range(len(ranks))
        self.hosts = {
            k: Host(
                KeeperCore(k, keepers, first, self.policy),
                {m.id for m in members if m.keeper == k},
            )
            for k in keepers
        }
        self.sent: list[tuple[int, int, Message]] = []
        self.blocked: set[tuple[int, int]] = set()
        self.decided: dict[int, View] = {0: first}
        self.ever = {m.id: m for m in members}

    def execute(self, keeper: int, commands: list[Send | Deliver]) -> None:
        for command in commands:
            match command:
                case Send(to, message):
                    self.sent.append((keeper, to, message))
                case Deliver(view):
                    host = self.hosts[keeper]
                    assert view == self.decided.setdefault(view.generation, view)
                    if host.delivered:
                        assert view.generation > host.delivered[-1].generation
                    host.delivered.append(view)

    def deliver(self, index: int, *, keep: bool = False) -> None:
        sender, to, message = self.sent[index]
        if not keep:
            del self.sent[index]
        if to in self.hosts and (sender, to) not in self.blocked:
            core = self.hosts[to].core
            self.execute(to, core.receive(sender, message, self.now_s))

    def ready(self, keeper: int, member: int) -> None:
        row = Member(id=member, keeper=keeper, address=f"h{keeper}:{member}")
        self.execute(keeper, self.hosts[keeper].core.ready(row, self.now_s))

    def kill(self, keeper: int, member: int) -> None:
        self.hosts[keeper].alive.discard(member)
        self.execute(keeper, self.hosts[keeper].core.ended(member, self.now_s))

    def newcomer(self, keeper: int) -> int:
        member, self.next_id = self.next_id, self.next_id + 1
        self.hosts[keeper].alive.add(member)
        self.ready(keeper, member)
        return member

    def all_ready(self) -> None:
        for keeper, host in self.hosts.items():
            for member in sorted(host.alive):
                self.ready(keeper, member)

    def run(self, seconds: float) -> None:
        """Deliver everything in order, tick after tick."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for keeper in list(self.hosts):
                core = self.hosts[keeper].core
                self.execute(keeper, core.tick(self.now_s))
            budget = 10_000
            while self.sent:
                budget -= 1
                assert budget, "keepers never fall silent"
                self.deliver(0)

    def host_joins(self) -> int:
        """A keeper without ranks takes part, which knows the first keeper's view."""
        keeper = max(self.hosts) + 1
        first = self.view(min(self.hosts))
        for host in self.hosts.values():
            host.core.meet(keeper)
        core = KeeperCore(keeper, list(self.hosts), first, self.policy)
        self.hosts[keeper] = Host(core)
        return keeper

    def cut(self, *side: int) -> None:
        others = self.hosts.keys() - set(side)
        self.blocked |= {(a, b) for a in side for b in others}
        self.blocked |= {(b, a) for a in side for b in others}

    def view(self, keeper: int) -> View:
        return self.hosts[keeper].core.view


def formed(ranks: list[int], policy: VotePolicy | None = None) -> World:
    world = World(ranks, policy)
    world.all_ready()
    world.run(1.0)
    return world


def test_all_ranks_form_the_first_view() -> None:
    world = formed([2, 2])
    assert {world.view(k).ids for k in (0, 1)} == {(0, 1, 2, 3)}
    assert {world.view(k).generation for k in (0, 1)} == {1}


def test_no_view_is_formed_before_all_started_ranks_are_ready_or_ended() -> None:
    world = World([2, 1])
    world.ready(0, 0)
    world.ready(1, 2)
    world.run(10.0)
    assert world.decided.keys() == {0}
    world.kill(0, 1)
    world.run(2.0)
    assert world.view(1).ids == (0, 2)


def test_one_keeper_decides_at_once() -> None:
    world = World([4])
    world.all_ready()
    assert world.view(0).ids == (0, 1, 2, 3)
    world.kill(0, 0)
    assert world.view(0).ids == (1, 2, 3)
    assert world.view(0).members[0].address == "h0:1"


def test_half_of_the_ranks_continues_only_with_rank_0() -> None:
    world = formed([2, 2])
    world.cut(0)
    world.run(6.0)
    assert world.view(0).ids == (0, 1)
    assert world.view(1).generation == 1


def test_a_keeper_that_lost_ranks_keeps_their_votes() -> None:
    """With votes of living ranks alone, both sides here would continue."""
    world = formed([3, 2])
    world.cut(0)
    world.run(6.0)
    assert world.view(0).ids == (0, 1, 2)
    world.kill(0, 1)
    world.kill(0, 2)
    world.blocked.clear()
    world.run(0.2)
    assert world.view(0).ids == (0,)
    assert world.view(1).generation in (1, world.view(0).generation)


def test_a_keeper_that_was_cut_off_learns_what_was_decided() -> None:
    world = formed([2, 2, 2])
    world.cut(2)
    world.run(6.0)
    world.blocked.clear()
    world.run(1.0)
    assert world.view(2).ids == (0, 1, 2, 3)
    world.newcomer(2)
    world.run(1.0)
    assert world.view(0).ids == (0, 1, 2, 3, 6)


def test_a_keeper_that_hears_but_is_not_heard_is_left_out() -> None:
    world = formed([1, 1, 1])
    world.blocked = {(2, 0), (2, 1)}
    world.run(8.0)
    assert world.view(0).ids == (0, 1)


def test_a_keeper_that_is_heard_but_does_not_hear_is_left_out() -> None:
    world = formed([1, 1, 1])
    world.blocked = {(0, 2), (1, 2)}
    world.run(4.5)
    assert world.view(0).ids == (0, 1)
    assert world.hosts[2].core.is_cut_off(world.now_s)


def test_a_link_that_fails_for_less_than_the_limit_changes_nothing() -> None:
    world = formed([1, 1, 1])
    world.cut(2)
    world.run(1.9)
    world.blocked.clear()
    world.run(5.0)
    assert world.view(0).generation == 1


def test_a_keeper_that_is_cut_off_begins_no_ballot() -> None:
    world = formed([1, 1, 1])
    world.cut(2)
    world.run(3.5)
    world.kill(2, 2)
    world.sent.clear()
    world.hosts[2].core.failed(1, world.now_s)
    world.run(1.0)
    assert world.view(2).generation == 1
    assert world.hosts[2].core._highest_round == 0


def test_a_host_that_joins_later_adds_its_ranks() -> None:
    world = formed([1, 1])
    keeper = world.host_joins()
    world.run(1.0)
    assert world.view(0).generation == 1
    member = world.newcomer(keeper)
    world.run(1.0)
    assert world.view(0).ids == world.view(keeper).ids == (0, 1, member)


def test_a_host_that_returns_takes_no_place_of_one_it_does_not_reach_yet() -> None:
    world = formed([1, 1, 1, 1])
    world.cut(3)
    world.run(6.0)
    assert world.view(0).ids == (0, 1, 2)
    world.blocked = {(1, 3), (3, 1)}
    world.run(0.5)
    world.ready(3, 3)
    world.run(2.0)
    assert world.view(0).ids == (0, 1, 2)
    world.blocked.clear()
    world.run(4.0)
    assert world.view(1).ids == (0, 1, 2, 3)


def test_no_rank_joins_once_a_rank_of_another_host_has_finished() -> None:
    world = formed([1, 1, 1])
    world.execute(0, world.hosts[0].core.left(0, world.now_s))
    world.run(0.5)
    world.newcomer(1)
    world.run(2.0)
    assert world.view(1).generation == 1


def a_rank_that_left(in_step: int, *, others_in: int) -> World:
    """Return hosts of which one has a rank that left, and another one a newcomer."""
    world = formed([1, 1, 1])
    for host in world.hosts.values():
        host.core.step = in_step
    core = world.hosts[0].core
    world.execute(0, core.left(0, world.now_s, step=in_step))
    world.execute(1, world.hosts[1].core.failed(1, world.now_s))
    world.run(1.0)
    assert world.view(2).ids == (1, 2)
    for keeper in (1, 2):
        world.hosts[keeper].core.step = others_in
    world.run(0.5)
    world.newcomer(1)
    world.run(2.0)
    return world


def test_ranks_join_once_the_others_train_on_after_one_that_left() -> None:
    assert a_rank_that_left(7, others_in=8).view(2).ids == (1, 2, 3)


def test_no_rank_joins_while_the_others_are_in_the_step_of_one_that_left() -> None:
    assert a_rank_that_left(7, others_in=7).view(2).ids == (1, 2)


def test_a_rank_that_ended_early_is_lost() -> None:
    world = formed([3])
    core = world.hosts[0].core
    world.execute(0, core.left(1, world.now_s, step=7))
    world.execute(0, core.ended_early(1, world.now_s))
    world.run(1.0)
    assert world.view(0).ids == (0, 2)


def test_less_than_the_least_ranks_may_finish_after_one_that_has() -> None:
    world = formed([2], VotePolicy(min_ranks=2))
    core = world.hosts[0].core
    world.execute(0, core.left(1, world.now_s))
    world.execute(0, core.failed(1, world.now_s))
    world.run(1.0)
    assert world.view(0).ids == (0,)


def test_ranks_wait_for_one_that_left_before_training() -> None:
    world = World([1, 1])
    world.ready(0, 0)
    assert not world.hosts[0].core.waits_for_left()
    world.execute(1, world.hosts[1].core.left(1, world.now_s))
    world.run(0.5)
    assert world.hosts[0].core.waits_for_left()


def test_keepers_without_a_link_between_them_are_not_in_one_view() -> None:
    world = formed([1, 1, 1])
    world.blocked = {(0, 2), (2, 0)}
    world.run(8.0)
    newest = max(world.decided)
    assert not {0, 2} <= set(world.decided[newest].ids)


def test_a_failed_collective_without_a_loss_gives_the_same_ranks_a_new_view() -> None:
    world = formed([2])
    world.execute(0, world.hosts[0].core.failed(1, world.now_s))
    world.run(1.0)
    assert world.view(0).generation == 2
    assert world.view(0).ids == (0, 1)


def test_a_failure_of_an_earlier_generation_changes_nothing() -> None:
    world = formed([2])
    world.kill(0, 1)
    world.execute(0, world.hosts[0].core.failed(1, world.now_s))
    world.run(2.0)
    assert world.view(0).generation == 2


def test_ranks_that_leave_after_training_change_nothing() -> None:
    world = formed([3])
    for member in (0, 2):
        world.execute(0, world.hosts[0].core.left(member, world.now_s))
        world.kill(0, member)
    world.run(1.0)
    assert world.view(0).generation == 1


def test_no_view_has_less_than_the_least_ranks() -> None:
    world = formed([3], VotePolicy(min_ranks=3))
    world.kill(0, 1)
    world.run(2.0)
    assert world.view(0).generation == 1
    world.newcomer(0)
    world.run(1.0)
    assert world.view(0).ids == (0, 2, 3)


def test_no_view_has_more_than_the_most_ranks() -> None:
    world = formed([2], VotePolicy(max_ranks=2))
    world.newcomer(0)
    world.run(1.0)
    assert world.view(0).ids == (0, 1)


def test_keepers_that_all_hear_each_other() -> None:
    view = View(generation=1, members=tuple(Member(id=i, keeper=i) for i in range(4)))
    hears = {0: (1, 2, 3), 1: (0, 2), 2: (0, 1, 3), 3: (0, 2)}
    assert all_hearing(hears, view) == [0, 1, 2]


class Keepers(RuleBasedStateMachine):
    """Anything may happen to processes and messages; each view is decided once."""

    @initialize(ranks=st.lists(st.integers(1, 2), min_size=2, max_size=4))
    def start(self, ranks: list[int]) -> None:
        self.world = formed(ranks)

    def _host(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.world.hosts)), "keeper")

    @rule()
    def train(self) -> None:
        self.world.run(5.0)

    @rule(seconds=st.sampled_from([0.1, 0.35, 4.0]))
    def tick(self, seconds: float) -> None:
        world = self.world
        world.now_s += seconds
        for keeper, host in world.hosts.items():
            world.execute(keeper, host.core.tick(world.now_s))

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data(), doubled=st.booleans())
    def deliver(self, data: st.DataObject, doubled: bool) -> None:
        index = data.draw(st.integers(0, len(self.world.sent) - 1))
        self.world.deliver(index, keep=doubled)

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data())
    def deliver_some(self, data: st.DataObject) -> None:
        """Deliver in any order, which delays the rest."""
        for _ in range(data.draw(st.integers(1, 12))):
            if sent := self.world.sent:
                self.world.deliver(data.draw(st.integers(0, len(sent) - 1)))

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.world.sent[data.draw(st.integers(0, len(self.world.sent) - 1))]

    @rule(data=st.data())
    def drop_a_direction(self, data: st.DataObject) -> None:
        pair = self._host(data), self._host(data)
        self.world.blocked ^= {pair}

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        self.world.cut(self._host(data))

    @rule()
    def heal(self) -> None:
        self.world.blocked.clear()

    @rule(data=st.data())
    def kill_rank(self, data: st.DataObject) -> None:
        keeper = self._host(data)
        if alive := sorted(self.world.hosts[keeper].alive):
            self.world.kill(keeper, data.draw(st.sampled_from(alive)))

    @precondition(lambda self: len(self.world.hosts) > 1)
    @rule(data=st.data())
    def kill_host(self, data: st.DataObject) -> None:
        del self.world.hosts[self._host(data)]

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        self.world.newcomer(self._host(data))

    @precondition(lambda self: len(self.world.hosts) < 5)
    @rule()
    def host_joins(self) -> None:
        self.world.host_joins()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        keeper = self._host(data)
        core = self.world.hosts[keeper].core
        commands = core.failed(core.view.generation, self.world.now_s)
        self.world.execute(keeper, commands)

    @invariant()
    def every_view_is_one(self) -> None:
        if not hasattr(self, "world"):
            return
        decided = self.world.decided
        for generation, view in decided.items():
            assert view.generation == generation
            assert len(set(view.ids)) == len(view.ids)
        for host in self.world.hosts.values():
            assert host.core.view == decided[host.core.view.generation]

    def teardown(self) -> None:
        """Once everything works again, all that can train do so in one view."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.blocked.clear()
        world.run(20.0)
        newest = world.decided[max(world.decided)]
        if newest.generation == 0:
            return
        if not newest.is_majority(world.hosts.keys()):
            return
        for keeper, host in world.hosts.items():
            known = host.core._ready.keys()
            for member in sorted(host.alive - known):  # left out before: asks again
                world.ready(keeper, member)
        world.run(20.0)
        alive = {m for host in world.hosts.values() for m in host.alive}
        views = {host.core.view for host in world.hosts.values()}
        if not alive:
            return
        assert len(views) == 1
        assert set(views.pop().ids) == alive


Keepers.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestKeepers = Keepers.TestCase


def test_a_prepared_ballot_finishes_what_another_may_have_decided() -> None:
    """The candidate ends between acceptance and news of it."""
    world = formed([1, 1, 1])
    world.kill(0, 0)  # keeper 0 begins a ballot
    while not any(isinstance(m, Accept) for _, _, m in world.sent):
        world.deliver(0)
    sent, world.sent = world.sent, []
    accept = next(row for row in sent if isinstance(row[2], Accept) and row[1] == 1)
    world.sent = [accept]
    world.deliver(0)  # keeper 1 has accepted, and with keeper 0 decided
    assert isinstance(world.sent.pop()[2], Accepted)
    decided = accept[2].view
    del world.hosts[0]
    world.kill(1, 1)
    world.run(8.0)
    assert world.decided[decided.generation] == decided
    assert world.view(2).ids == (2,)


def test_a_promise_is_kept() -> None:
    world = formed([1, 1])
    core = world.hosts[0].core
    generation = core.view.generation + 1
    high = Prepare(generation=generation, ballot=(5, 1))
    (reply,) = core.receive(1, high, world.now_s)
    assert isinstance(reply.message, Promise)
    low = Accept(generation=generation, ballot=(4, 1), view=core.view)
    (reply,) = core.receive(1, low, world.now_s)
    assert not isinstance(reply.message, Accepted)
