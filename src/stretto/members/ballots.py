"""Decide each next view once, whatever messages are lost, late or duplicated.

Pure: events and times in, commands out. Every keeper has a `KeeperCore`.

# Note [One decision per generation]
Each view is decided by its predecessor's keepers with single-decree Paxos. A keeper
that wants a change prepares a ballot; each keeper promises it, unless it has promised
a higher one, and says which of its ranks are ready and which keepers it hears. With
promises of a majority (`View.is_majority`) the candidate proposes a view: one that may
already be decided, if a promise names such a view, or else one of the ranks reported
to it. The view is decided once a majority has accepted it. Majorities of one view
overlap, so a generation never has two views.

A keeper that is cut off gets no promises, so its ranks stay in the old view, in which
no collective can end. A keeper that has restarted is another keeper, so no vote has to
survive its process.

# Note [Hearing counts in both directions]
Where packets are dropped in one direction, one side hears the other. So each beat says
whom its keeper has heard lately, and a keeper counts as lost once it was not heard, or
has not said that it hears this one, for `VotePolicy.silent_s`. A promise needs both
directions between candidate and voter. Between two voters, each says whom it hears, and
a view contains only keepers that all hear each other.

A keeper with such links to less than a majority begins no ballot: its ballots could
only delay those of the others. Its ranks wait (`KeeperCore.is_cut_off`).

# Note [A rank that ends early]
A rank whose process ends without an error seems to have finished training, and then
others do so, too: none may join any more, and fewer than the least number may train to
the end. But its program may have ended it alone, such as in a handler of a signal. No
other rank can be in a later step then than it was, unless they train on without it. So
once one is, the rank counts as lost. Programs that don't number steps have step 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.members.view import Member, View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

Ballot = tuple[int, int]
"""Round and keeper; higher ones win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VotePolicy:
    """Limits and times of a job's membership."""

    min_ranks: int = 1
    max_ranks: int = 1 << 20

    silent_s: float = 3.0
    """A keeper counts as lost when there was no link in both directions for so long."""

    hear_s: float = 1.0
    """A keeper says that it hears another for this long after its last message."""

    failure_grace_s: float = 0.2
    """How long a failed collective waits for news of an ended rank."""

    gather_s: float = 1.0
    """How long a candidate waits for promises of keepers that it hears."""

    recent_s: float = 0.5
    """A candidate waits only for keepers that it heard within this time."""

    ballot_s: float = 2.0
    """How long a ballot may take."""

    stagger_s: float = 0.3
    """How much later each further keeper takes another for lost, to avoid rivals."""

    retry_s: float = 0.3
    """Pause after a ballot without result, times the candidate's place."""


# Messages between keepers. `generation` is the one to be decided.


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Sent at every tick: this keeper runs, and has this view."""

    generation: int
    hears: tuple[int, ...]

    step: int = 0
    """The furthest step of the job that one of its ranks is in; 0 if none says one."""

    left_in: int | None = None
    """The furthest step in which one of its ranks has finished training, if any has."""

    is_done: bool = False
    """Whether all its ranks have ended, so that it may end without being a loss."""

    waits_long: bool = False
    """Whether one of its ranks has waited for others for suspiciously long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """A candidate asks for promises."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A keeper accepts nothing below the ballot, and reports what it knows."""

    generation: int
    ballot: Ballot
    accepted: tuple[Ballot, View] | None
    ready: tuple[Member, ...]
    is_settled: bool
    """Whether each rank that this keeper was to start is ready or has ended."""
    hears: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """A keeper has promised a higher ballot."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """A candidate proposes a view."""

    generation: int
    ballot: Ballot
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A keeper has accepted the ballot's view."""

    generation: int
    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A view was decided."""

    view: View


Message = Beat | Prepare | Promise | Refuse | Accept | Accepted | Decided


# Commands.


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to another keeper; it may be lost."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give a new view to all local ranks, members or not."""

    view: View


Command = Send | Deliver


@dataclass
class _Candidacy:
    """One ballot of this keeper's."""

    generation: int
    ballot: Ballot
    began_s: float
    promises: dict[int, Promise] = field(default_factory=dict)
    proposed: View | None = None
    accepted_by: set[int] = field(default_factory=set)


@final
class KeeperCore:
    """The state and the decisions of one keeper."""

    def __init__(
        self, keeper: int, peers: Iterable[int], first: View, policy: VotePolicy
    ) -> None:
        """Begin with the launcher's view.

        Args:
            keeper: this keeper's number.
            peers: all other keepers of the job.
            first: view 0, equal on all keepers; members need no addresses.
            policy: equal on all keepers.
        """
        self._keeper, self._policy = keeper, policy
        self.peers = tuple(sorted(set(peers) - {keeper}))
        """All other keepers, also those that were lost."""

        self.view = first
        """The last view that this keeper knows to be decided."""

        self._starting = {m.id for m in first.members if m.keeper == keeper}
        self._ready: dict[int, Member] = {}
        self._left: dict[int, int] = {}
        self._failed_s: float | None = None
        self._heard_s: dict[int, float] = {}
        self._linked_s: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
        self.is_done = False
        """Whether all local ranks have ended for good; set by the owner."""

        self.step = 0
        """The furthest step that a local rank is in; set by the owner."""

        self.waits_long = False
        """Whether a local rank has waited for long; set by the owner."""

        self._began_s: float | None = None
        self._promised: Ballot | None = None
        self._accepted: tuple[Ballot, View] | None = None
        self._highest_round = 0
        self._candidacy: _Candidacy | None = None
        self._retry_s = 0.0

    # events

    def ready(self, member: Member, now_s: float) -> list[Command]:
        """A local rank can train from the next view on."""
        self._starting.discard(member.id)
        self._ready[member.id] = member
        return self._advance(now_s)

    def ended(self, member: int, now_s: float) -> list[Command]:
        """A local rank's process has ended."""
        return self.drained([member], now_s)

    def drained(self, members: Iterable[int], now_s: float) -> list[Command]:
        """Local ranks train no longer: the next view is without all of them."""
        for member in members:
            self._starting.discard(member)
            self._ready.pop(member, None)
        return self._advance(now_s)

    def left(self, member: int, now_s: float, *, step: int = 0) -> list[Command]:
        """A local rank has finished training: its end changes nothing.

        Args:
            member: the rank.
            now_s: the time.
            step: the step that it was in last; see Note [A rank that ends early].
        """
        self._left[member] = step
        self._ready.pop(member, None)
        return self._advance(now_s)

    def ended_early(self, member: int, now_s: float) -> list[Command]:
        """A local rank that seemed to have finished training had not, and is lost."""
        self._left.pop(member, None)
        return self.ended(member, now_s)

    def failed(self, generation: int, now_s: float) -> list[Command]:
        """A local rank's collective in a generation can't end."""
        if generation == self.view.generation and self._failed_s is None:
            self._failed_s = now_s
        return self._advance(now_s)

    def tick(self, now_s: float) -> list[Command]:
        """Time has passed; call it several times per `VotePolicy.gather_s`."""
        return [*self._to_peers(self.beat(now_s)), *self._advance(now_s)]

    def beat(self, now_s: float) -> Beat:
        """Return what this keeper says about itself now."""
        return Beat(
            generation=self.view.generation,
            hears=self._hears(now_s, within_s=self._policy.hear_s),
            step=self.step,
            left_in=max(self._left.values(), default=None),
            is_done=self.is_done,
            waits_long=self.waits_long,
        )

    def meet(self, keeper: int) -> None:
        """Another keeper takes part from now on."""
        if keeper != self._keeper:
            self.peers = tuple(sorted({*self.peers, keeper}))

    def is_leaving(self) -> bool:
        """Return whether a rank of any keeper has finished training: none may join."""
        left_in = [*self._left.values()]
        left_in += [b.left_in for b in self._beats.values() if b.left_in is not None]
        return bool(left_in) and max(left_in) >= self.furthest_step()

    def furthest_step(self) -> int:
        """Return the furthest step that a rank is in, as far as is known."""
        steps = [b.step for k, b in self._beats.items() if k in self.view.keepers]
        return max([self.step, *steps])

    def has_left(self) -> bool:
        """Return whether a local rank has finished training."""
        return bool(self._left)

    def waits_for_left(self) -> bool:
        """Return whether local ranks wait for the first view, and one has left."""
        left_in = [b.left_in for b in self._beats.values() if not b.generation]
        has_left = self._left or any(each is not None for each in left_in)
        return not self.view.generation and bool(self._ready and has_left)

    def others_wait(self, now_s: float) -> bool:
        """Return whether another keeper of the view says that a rank waits long."""
        linked = self.linked(now_s)
        return any(
            keeper in linked and beat.waits_long
            for keeper, beat in self._beats.items()
            if keeper in self.view.keepers
        )

    def is_cut_off(self, now_s: float) -> bool:
        """Return whether too few keepers are linked with this one to decide a view."""
        return not self.view.is_majority({self._keeper, *self.linked(now_s)})

    def linked(self, now_s: float) -> tuple[int, ...]:
        """Return the keepers that hear this one and are heard by it."""
        limit_s = now_s - self._policy.silent_s
        return tuple(
            peer for peer in self.peers if self._linked_s.get(peer, -1e9) > limit_s
        )

    def are_done(self, keepers: Iterable[int]) -> bool:
        """Return whether all ranks of these keepers have ended, as far as is known."""
        return all(k in self._beats and self._beats[k].is_done for k in keepers)

    def receive(self, sender: int, message: Message, now_s: float) -> list[Command]:
        """A message of another keeper has come."""
        self._heard_s[sender] = now_s
        match message:
            case Decided():
                return self._adopt(message.view, now_s)
            case Beat():
                self._beats[sender] = message
                if self._keeper in message.hears:
                    self._linked_s[sender] = now_s
                if message.generation < self.view.generation:
                    return [Send(sender, Decided(view=self.view))]
                return []
        if message.generation <= self.view.generation:
            if isinstance(message, Prepare | Accept):
                return [Send(sender, Decided(view=self.view))]
            return []
        if message.generation > self.view.generation + 1:  # this keeper is behind
            return [Send(sender, self.beat(now_s))]
        return self._vote(sender, message, now_s)

    # voting

    def _vote(self, sender: int, message: Message, now_s: float) -> list[Command]:
        match message:
            case Prepare():
                return [Send(sender, self._on_prepare(message, now_s))]
            case Accept():
                return [Send(sender, self._on_accept(message))]
            case Promise():
                candidacy = self._candidacy
                if candidacy is not None and candidacy.ballot == message.ballot:
                    candidacy.promises[sender] = message
            case Accepted():
                candidacy = self._candidacy
                if candidacy is not None and candidacy.ballot == message.ballot:
                    candidacy.accepted_by.add(sender)
            case Refuse():
                self._highest_round = max(self._highest_round, message.ballot[0])
                if self._candidacy is not None:
                    self._give_up_ballot(now_s)
            case _:
                pass
        return self._advance(now_s)

    def _on_prepare(self, message: Prepare, now_s: float) -> Promise | Refuse:
        self._highest_round = max(self._highest_round, message.ballot[0])
        if self._promised is not None and message.ballot < self._promised:
            return Refuse(generation=message.generation, ballot=self._promised)
        self._promised = message.ballot
        return Promise(
            generation=message.generation,
            ballot=message.ballot,
            accepted=self._accepted,
            ready=tuple(self._ready[member] for member in sorted(self._ready)),
            is_settled=not self._starting,
            hears=self._hears(now_s),
        )

    def _on_accept(self, message: Accept) -> Accepted | Refuse:
        if self._promised is not None and message.ballot < self._promised:
            return Refuse(generation=message.generation, ballot=self._promised)
        self._promised = message.ballot
        self._accepted = message.ballot, message.view
        return Accepted(generation=message.generation, ballot=message.ballot)

    def _adopt(self, view: View, now_s: float) -> list[Command]:
        if view.generation <= self.view.generation:
            return []
        for member in self.view.ids:
            if view.rank(member) is None:  # it must ask again, as a newcomer
                self._ready.pop(member, None)
        self.view = view
        self._promised = self._accepted = None
        self._candidacy = None
        self._failed_s = None
        self._highest_round, self._retry_s = 0, 0.0
        self._began_s = now_s
        return [Deliver(view), *self._advance(now_s)]

    # candidacy

    def _advance(self, now_s: float) -> list[Command]:
        """Begin, continue or give up a ballot."""
        if self._began_s is None:
            self._began_s = now_s
        candidacy = self._candidacy
        if candidacy is None:
            if now_s < self._retry_s or not self._wants_change(now_s):
                return []
            if self.is_cut_off(now_s):
                return []
            return self._begin_ballot(now_s)
        if candidacy.proposed is None:
            recent = self._hears(now_s, within_s=self._policy.recent_s)
            linked = {self._keeper, *(set(recent) & set(self.linked(now_s)))}
            is_late = now_s >= candidacy.began_s + self._policy.gather_s
            promised = candidacy.promises.keys()
            if (is_late or promised >= linked) and self.view.is_majority(promised):
                return self._propose(candidacy, now_s)
        elif self.view.is_majority(candidacy.accepted_by):
            view = candidacy.proposed
            return [*self._to_peers(Decided(view=view)), *self._adopt(view, now_s)]
        if now_s >= candidacy.began_s + self._policy.ballot_s:
            self._give_up_ballot(now_s)
        return []

    def _wants_change(self, now_s: float) -> bool:
        view = self.view
        if view.generation == 0:
            return not self._starting
        if self._has_loss(now_s):
            return True
        room = len(view.members) < self._policy.max_ranks and not self.is_leaving()
        return room and any(view.rank(member) is None for member in self._ready)

    def _has_loss(self, now_s: float) -> bool:
        """Return whether the present ranks can't continue, as far as is known here."""
        view, policy = self.view, self._policy
        mine = [m.id for m in view.members if m.keeper == self._keeper]
        if any(m not in self._ready and m not in self._left for m in mine):
            return True
        if (
            self._failed_s is not None
            and now_s >= self._failed_s + policy.failure_grace_s
        ):
            return True
        return bool(self.lost(now_s, later_s=policy.stagger_s * self._place(now_s)))

    def _begin_ballot(self, now_s: float) -> list[Command]:
        generation = self.view.generation + 1
        self._highest_round += 1
        ballot = self._highest_round, self._keeper
        candidacy = _Candidacy(generation, ballot, now_s)
        prepare = Prepare(generation=generation, ballot=ballot)
        own = self._on_prepare(prepare, now_s)
        if isinstance(own, Refuse):  # a higher ballot of a higher keeper's
            self._highest_round = max(self._highest_round, own.ballot[0])
            self._retry_s = now_s + self._policy.retry_s
            return []
        self._candidacy = candidacy
        candidacy.promises[self._keeper] = own
        return [*self._to_peers(prepare), *self._advance(now_s)]

    def _propose(self, candidacy: _Candidacy, now_s: float) -> list[Command]:
        accepted = [p.accepted for p in candidacy.promises.values() if p.accepted]
        if accepted:  # it may be decided already
            view: View | None = max(accepted, key=lambda row: row[0])[1]
        else:
            view = self._new_view(candidacy, only_adds=not self._has_loss(now_s))
        if view is None:
            self._give_up_ballot(now_s)
            return []
        candidacy.proposed = view
        accept = Accept(
            generation=candidacy.generation, ballot=candidacy.ballot, view=view
        )
        if isinstance(self._on_accept(accept), Accepted):
            candidacy.accepted_by.add(self._keeper)
        return [*self._to_peers(accept), *self._advance(now_s)]

    def _new_view(self, candidacy: _Candidacy, *, only_adds: bool) -> View | None:
        """Return the ranks that can train together, or ``None`` if they may not yet.

        Args:
            candidacy: with the promises.
            only_adds: whether nothing is known to be lost. Then a rank that is not
                reported has a keeper whose promise is late, and stays.
        """
        old, promises = self.view, candidacy.promises
        hears = {k: p.hears for k, p in promises.items()}
        hears[self._keeper] = tuple(promises)  # both directions work
        together = all_hearing(hears, old)
        if old.generation == 0 and not (
            set(together) >= set(old.keepers)
            and all(promise.is_settled for promise in promises.values())
        ):
            return None
        found = {m.id: m for k in together for m in promises[k].ready}
        ids = [member for member in old.ids if member in found]
        ids += sorted(found.keys() - set(ids))
        ids = ids[: self._policy.max_ranks]
        # Those that are left after others have finished need not wait for more.
        least = 1 if self.is_leaving() else self._policy.min_ranks
        if len(ids) < max(1, least):
            return None
        if only_adds and old.generation and not set(old.ids) <= set(ids):
            return None
        members = tuple(found[member] for member in ids)
        if members == old.members and self._failed_s is None:
            return None  # what was wanted is no longer true
        return View(generation=candidacy.generation, members=members)

    def _give_up_ballot(self, now_s: float) -> None:
        self._candidacy = None
        pause_s = self._policy.retry_s * (1 + self._place(now_s))
        self._retry_s = now_s + pause_s

    # hearing

    def _hears(self, now_s: float, *, within_s: float | None = None) -> tuple[int, ...]:
        limit_s = now_s - (self._policy.silent_s if within_s is None else within_s)
        return tuple(
            peer for peer in self.peers if self._heard_s.get(peer, -1e9) > limit_s
        )

    def lost(self, now_s: float, *, later_s: float = 0.0) -> list[int]:
        """Return the keepers of the view that have had no link for too long."""
        limit_s = now_s - self._policy.silent_s - later_s
        began_s = self._began_s if self._began_s is not None else now_s
        return [
            peer
            for peer in self.view.keepers
            if peer != self._keeper
            and max(began_s, self._linked_s.get(peer, began_s)) <= limit_s
        ]

    def _place(self, now_s: float) -> int:
        """Return how many keepers that this one hears come before it."""
        order = [*self.view.keepers, *self.peers]
        heard = {self._keeper, *self._hears(now_s)}
        return [k for k in dict.fromkeys([*order, self._keeper]) if k in heard].index(
            self._keeper
        )

    def _to_peers(self, message: Message) -> list[Command]:
        return [Send(peer, message) for peer in self.peers]


def all_hearing(hears: Mapping[int, Collection[int]], view: View) -> list[int]:
    """Return keepers that all hear each other.

    The one with the most links missing is left out first; of equal ones, the one that
    is last in the view, and before it those that are not in it.

    Args:
        hears: for each keeper, those that it hears.
        view: the present one.
    """
    order = [k for k in view.keepers if k in hears]
    order += sorted(hears.keys() - set(order))
    while True:
        missing = {
            a: sum(1 for b in order if b != a and not (a in hears[b] and b in hears[a]))
            for a in order
        }
        most = max(missing.values(), default=0)
        if most == 0:
            return order
        order.remove(next(a for a in reversed(order) if missing[a] == most))
