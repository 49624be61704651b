"""The engine's state: which requests are ready on every rank. It does no I/O.

# Note [A round]
Every rank keeps the same table of known requests. A round is one bitwise-and all-reduce
of a vector (for bits the same as MIN): bit i means "request i is submitted here". A bit
set in the result means that the request is ready everywhere, and all ranks launch it,
in index order. A rank whose request is missing from the table, or differs from its
entry, clears a bit of the vector's head, and all ranks follow with one all-gather of
descriptions; each rank enters them into its table in the same order. There is no
coordinator: all ranks compute the same decisions from the same bits. This is Horovod's
response cache without the coordinator.

# Note [Who takes part in a round]
A rank enters a round when it has submitted anything that is not launched, and sleeps in
the all-reduce until the others enter. Nothing can become ready everywhere before every
rank has submitted something, so idle ranks need not take part, and an idle engine sends
nothing. If all ranks wait for different requests, rounds would follow each other
immediately; they are paced, see `stretto.runtime.negotiated.progress`.

# Note [Sequences]
A rank whose program makes one request of a sequence after the other can't submit
another while one is under way. So if a round shows two places of a sequence that are
begun somewhere and complete nowhere, no later round can complete either. Bits say
"nothing of this is submitted here", for requests and for sets: one that a round clears
is begun on some rank. Which rank is where is exchanged only then. What ends in a round
ends on all ranks, so no rank is ahead of another by more than what this sees.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.runtime.negotiated.requests import (
    CollectiveKind,
    Request,
    decode,
    difference,
    encode,
    out_of_sequence,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLASSES = 32
_SILENT = 1 << _CLASSES
_HEAD_BITS = 64
_SLOTS_STEP = 64
_SET_BITS = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """A request that is ready on every rank."""

    name: str

    by_rank: tuple[Request, ...]

    joined: frozenset[int]
    """Ranks that contribute zeros."""

    set_id: int = -1
    """The tensor set that a register request creates."""


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """A request that fails on every rank, with the same text."""

    name: str

    reason: str


@dataclass(frozen=True, slots=True)
class LaunchMembers:
    """Members of a tensor set that are ready on every rank, by index."""

    set_id: int

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndStep:
    """Every rank has submitted all of a tensor set."""

    set_id: int

    in_order: bool
    """Whether every rank's order was the same as before."""

    whole: bool
    """Whether no rank filled in a step that an error cut short."""

    unused: int
    """Bit mask of the members that no rank used."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Ranks are at different places of a sequence, and would wait for each other."""

    sequence: str


@dataclass(frozen=True, slots=True)
class EndJoin:
    """All ranks have joined."""

    last: int


Decision = Launch | RefuseRequest | LaunchMembers | EndStep | EndJoin | Conflict


@dataclass(slots=True)
class _Entry:
    """How ranks describe the request of one name."""

    name: str
    base: Request
    variants: dict[int, Request] = field(default_factory=dict)
    used: int = 0

    def of(self, rank: int) -> Request:
        return self.variants.get(rank, self.base)

    def groups(self) -> set[str]:
        return {self.base.group, *(v.group for v in self.variants.values())} - {""}


@dataclass(slots=True)
class _SetState:
    """The state of one tensor set in rounds."""

    request: Request
    """Which registered it."""
    submitted: int = 0
    launched: int = 0
    unused: int = 0
    vote: bool = False
    in_order: bool = False
    whole: bool = True

    @property
    def members(self) -> int:
        return len(self.request.members)

    @property
    def is_begun(self) -> bool:
        return self.vote or bool(self.submitted)


@final
class RequestLedger:
    """One rank's view of what all ranks have submitted.

    A round consists of `begin`, an and-reduction of its result, `announces` on the
    outcome, the exchange of `announcement` if required, and `finish`. Not thread-safe.
    """

    def __init__(
        self, *, rank: int, size: int, names: Sequence[int], known_requests: int
    ) -> None:
        self._rank = rank
        self._size = size
        self._names = tuple(names)
        self._known_requests = known_requests
        self._slots: list[_Entry | None] = []
        self._slot_of: dict[str, int] = {}
        self._pending: dict[str, Request] = {}
        self._bits = 0
        self._unannounced: dict[str, Request] = {}
        self._announcing: dict[str, Request] = {}
        self._sets: dict[int, _SetState] = {}
        self._next_set = 0
        self._wants_join = False
        self._joined: set[int] = set()
        self._round = 0
        self._text = b""
        self._places: dict[str, str] = {}
        """This rank's request of each sequence when the round began."""

    # This rank's actions.

    @property
    def pending(self) -> tuple[str, ...]:
        """Places of requests that were submitted here and are not launched."""
        return tuple(request.place for request in self._pending.values())

    def is_pending(self, name: str) -> bool:
        """Return whether this rank waits for a request of that name."""
        return name in self._pending

    @property
    def joined(self) -> bool:
        """Whether this rank has joined, or will in the next round."""
        return self._wants_join or self._rank in self._joined

    def submit(self, request: Request) -> None:
        """Add a request of this rank.

        Raises:
            SpecError: a request of that name is pending.
        """
        if request.name in self._pending:
            raise SpecError(
                f"{request.place} was submitted on rank {self._names[self._rank]} "
                f"while {self._pending[request.name].place} is pending. Wait for the "
                "first, or give each its own name."
            )
        self._pending[request.name] = request
        slot = self._slot_of.get(request.name)
        if slot is not None and self._entry(slot).of(self._rank) == request:
            self._bits |= 1 << slot
        else:
            self._unannounced[request.name] = request

    def join(self) -> None:
        """Ask to contribute zeros until all ranks have joined."""
        self._wants_join = True

    def submit_member(self, set_id: int, index: int) -> None:
        """Record that a member of a tensor set is ready here."""
        self._sets[set_id].submitted |= 1 << index

    def vote(self, set_id: int, *, in_order: bool, whole: bool, unused: int) -> None:
        """Record that all members of this step are submitted here."""
        state = self._sets[set_id]
        state.vote, state.in_order, state.whole = True, in_order, whole
        state.unused = unused

    def wants_round(self) -> bool:
        """Return whether this rank has anything that a round could end."""
        return bool(
            self._pending
            or self.joined
            or any(s.vote or s.submitted & ~s.launched for s in self._sets.values())
        )

    def first_ready(self, limit: int) -> list[tuple[int, str]]:
        """Return slots and names of known requests submitted here, in index order."""
        slots = itertools.islice(_set_bits(self._bits), limit)
        return [(slot, self._entry(slot).name) for slot in slots]

    # A round.

    def begin(self) -> bytes:
        """Return this rank's vector."""
        self._round += 1
        self._announcing, self._unannounced = self._unannounced, {}
        self._text = b""
        if self._announcing or self._wants_join:
            self._text = json.dumps(
                {
                    "join": self._wants_join,
                    "new": [encode(r) for r in self._announcing.values()],
                },
                separators=(",", ":"),
            ).encode()
        size_bytes = len(self._text)
        head = sum(1 << k for k in range(_CLASSES) if size_bytes <= 1 << k)
        if not size_bytes:
            head |= _SILENT
        slots = len(self._slots)
        every = (1 << slots) - 1
        joined = self._rank in self._joined
        vector = head
        at = _HEAD_BITS
        # A request being announced has a bit here only once all ranks know it.
        vector |= (every if joined else self._bits) << at
        vector |= (every & ~self._bits) << (at + slots)
        at += 2 * slots
        for state in self._sets.values():
            members = (1 << state.members) - 1
            ready, unused = state.submitted & ~state.launched, state.unused
            votes = state.vote | state.in_order << 1 | state.whole << 2
            votes |= (not state.is_begun) << 3
            if joined:
                votes, ready, unused = 0b1101, members, members
            vector |= votes << at
            vector |= (ready | unused << state.members) << (at + _SET_BITS)
            at += _SET_BITS + 2 * state.members
        self._places = {} if joined else self._places_now()
        return vector.to_bytes((at + 63) // 64 * 8, "little")

    def _places_now(self) -> dict[str, str]:
        """Return what this rank is at, of each sequence."""
        places = {
            state.request.sequence: f"set {set_id}"
            for set_id, state in self._sets.items()
            if state.request.sequence and state.is_begun
        }
        for request in self._pending.values():
            slot = self._slot_of.get(request.name)
            if request.sequence and slot is not None and self._bits >> slot & 1:
                places[request.sequence] = f"slot {slot}"
        return places

    def place(self, sequence: str) -> bytes:
        """Return what this rank is at, after a `Conflict`; see `conflict`."""
        return self._places.get(sequence, "").encode()

    def conflict(self, places: Sequence[bytes]) -> str:
        """Return the text of a conflict, from every rank's `place`."""
        by_rank = {}
        for rank, text in enumerate(places):
            kind, _, number = text.decode().partition(" ")
            if kind == "set":
                by_rank[self._names[rank]] = self._sets[int(number)].request.members
            elif kind == "slot":
                entry = self._entry(int(number))
                request = entry.of(rank)
                by_rank[self._names[rank]] = request.members or self._group_of(entry)
        return out_of_sequence(by_rank)

    def _group_of(self, entry: _Entry) -> tuple[Request, ...]:
        """Return the requests of an entry's group, with names that say their order."""
        group = entry.base.group
        if not group:
            return (entry.base,)
        bases = [e.base for e in self._slots if e is not None]
        rows = sorted((b for b in bases if b.group == group), key=_number_and_name)
        return tuple(
            dataclasses.replace(b, name=f"tensor {i}", group="", group_size=0)
            for i, b in enumerate(rows)
        )

    def announces(self, agreed: bytes) -> int:
        """Return the room in bytes for each announcement; 0 means no announcements."""
        head = int.from_bytes(agreed[: _HEAD_BITS // 8], "little")
        if head & _SILENT:
            return 0
        return 1 << next(k for k in range(_CLASSES) if head >> k & 1)

    def announcement(self) -> bytes:
        """Return this rank's announcement to all others."""
        return self._text

    def finish(
        self, agreed: bytes, announcements: Sequence[bytes] | None
    ) -> list[Decision]:
        """Return the decisions of this round, the same list on all ranks."""
        vector = int.from_bytes(agreed, "little") >> _HEAD_BITS
        slots = len(self._slots)
        every = (1 << slots) - 1
        idle = vector >> slots & every
        ready = vector & every & ~idle
        section = vector >> (2 * slots)
        decisions: list[Decision] = []
        conflicts = self._conflicts(every & ~(ready | idle), section)
        announced: dict[str, set[int]] = {}
        if announcements is not None:
            announced = self._enter(announcements, idle)
        active = self._size - len(self._joined)
        names = [self._entry(i).name for i in _bits_of(ready)]
        # A request just announced by every active rank is ready at once. A rank that
        # joined in this round counts from the next one.
        names += sorted(n for n, who in announced.items() if len(who) >= active)
        # Sets first: a launch may register a set, which has no bits in this vector.
        self._decide_sets(section, decisions)
        self._decide(names, decisions)
        if announcements is not None:
            self._enter_joined(announcements, decisions)
        return decisions + conflicts

    def _conflicts(self, partly: int, section: int) -> list[Decision]:
        """Return sequences of which ranks are at different places.

        Args:
            partly: Bits of the slots that some ranks, not all, have submitted.
            section: The agreed bits of tensor sets.
        """
        begun: dict[str, set[str]] = {}
        for set_id, state in self._sets.items():
            is_idle, vote = section >> 3 & 1, section & 1
            section >>= _SET_BITS + 2 * state.members
            if state.request.sequence and not (is_idle or vote):
                begun.setdefault(state.request.sequence, set()).add(f"set {set_id}")
        for slot in _set_bits(partly):
            entry = self._slots[slot]
            if entry is not None and entry.base.sequence:
                place = entry.base.group or f"slot {slot}"
                begun.setdefault(entry.base.sequence, set()).add(place)
        return [
            Conflict(name) for name, places in sorted(begun.items()) if len(places) > 1
        ]

    # Reading announcements.

    def _enter(self, announcements: Sequence[bytes], idle: int) -> dict[str, set[int]]:
        """Enter the announcements; return which ranks announced each name."""
        announced: dict[str, set[int]] = {}
        rows = []
        for rank, text in enumerate(announcements):
            for plain in json.loads(text or b"{}").get("new", ()):
                request = decode(plain)
                rows.append((rank, request))
                announced.setdefault(request.name, set()).add(rank)
        fresh = sorted(n for n in announced if n not in self._slot_of)
        self._make_room(len(fresh), idle, announced)
        free = [i for i, entry in enumerate(self._slots) if entry is None]
        first: dict[str, Request] = {}
        for _, request in rows:
            first.setdefault(request.name, request)
        if len(free) < len(fresh):
            free += range(
                len(self._slots),
                len(self._slots)
                + _SLOTS_STEP * -(-(len(fresh) - len(free)) // _SLOTS_STEP),
            )
            self._slots += [None] * (free[-1] + 1 - len(self._slots))
        for slot, name in zip(free, fresh, strict=False):
            self._slots[slot] = _Entry(name=name, base=first[name])
            self._slot_of[name] = slot
        for rank, request in rows:
            entry = self._entry(self._slot_of[request.name])
            entry.used = self._round
            entry.variants.pop(rank, None)
            if request != entry.base:
                entry.variants[rank] = request
        for name in self._announcing:
            self._bits |= 1 << self._slot_of[name]
        self._announcing = {}
        return announced

    def _make_room(self, fresh: int, idle: int, announced: dict[str, set[int]]) -> None:
        """Remove the least recently used names that no rank waits for."""
        excess = len(self._slot_of) + fresh - self._known_requests
        if excess <= 0:
            return
        candidates = [
            (self._entry(slot).used, slot)
            for name, slot in self._slot_of.items()
            if idle >> slot & 1 and name not in announced
        ]
        for _, slot in sorted(candidates)[:excess]:
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        entry = self._entry(slot)
        self._slots[slot] = None
        del self._slot_of[entry.name]
        if self._bits >> slot & 1:
            # Submitted here since this round began: announce it in the next round.
            self._bits &= ~(1 << slot)
            if entry.name in self._pending:
                self._unannounced[entry.name] = self._pending[entry.name]

    # Deciding.

    def _decide(self, names: list[str], decisions: list[Decision]) -> None:
        ready_by_group: dict[str, int] = {}
        for name in names:
            group = self._current(self._entry_of(name)).group
            ready_by_group[group] = ready_by_group.get(group, 0) + 1
        reasons = {name: self._trouble(self._entry_of(name)) for name in names}
        refused: dict[str, str] = {}
        for name, reason in reasons.items():
            if reason is not None:
                for group in self._entry_of(name).groups():
                    refused.setdefault(group, reason)
        for name, reason in reasons.items():
            entry = self._entry_of(name)
            current = self._current(entry)
            group = current.group
            reason = reason or refused.get(group)
            if reason is not None:
                self._end(name, forget=True)
                decisions.append(RefuseRequest(name, reason))
            elif not group or ready_by_group[group] == current.group_size:
                by_rank = tuple(entry.of(r) for r in range(self._size))
                self._end(name, forget=False)
                self._record_launch(entry)
                set_id = self._register(by_rank[0])
                joined = frozenset(self._joined)
                decisions.append(Launch(name, by_rank, joined, set_id))
        self._refuse_groups(refused, decisions)

    def _current(self, entry: _Entry) -> Request:
        """Return the request that active ranks submitted, if they agree.

        The base may be an older one of that name, for instance of a larger group.
        """
        active = (r for r in range(self._size) if r not in self._joined)
        return entry.of(next(active, 0))

    def _refuse_groups(
        self, refused: dict[str, str], decisions: list[Decision]
    ) -> None:
        """End every request of a group in which one request failed."""
        if not refused:
            return
        launched = {d.name for d in decisions if isinstance(d, Launch)}
        doomed = {}
        for name, slot in self._slot_of.items():
            groups = sorted(self._entry(slot).groups() & refused.keys())
            if groups and name not in launched:
                doomed[name] = refused[groups[0]]
        for name in sorted(doomed):
            mine = self._pending.get(name)
            if mine is not None and mine.group in refused:
                self._end(name, forget=True)
            else:
                self._forget(self._slot_of[name])
            decisions.append(RefuseRequest(name, doomed[name]))

    def _trouble(self, entry: _Entry) -> str | None:
        active = [r for r in range(self._size) if r not in self._joined]
        requests = [entry.of(r) for r in active]
        reason = difference(requests, [self._names[r] for r in active])
        if reason is not None or not self._joined:
            return reason
        request = requests[0]
        summing = request.kind is CollectiveKind.ALLREDUCE and request.op in (
            "sum",
            "average",
        )
        if summing:
            return None
        what = request.kind.value
        if request.kind is CollectiveKind.ALLREDUCE:
            what += f" with op {request.op}"
        gone = ", ".join(str(self._names[r]) for r in sorted(self._joined))
        return (
            f"{request.place}: {what} is not supported while ranks have joined "
            f"(joined: {gone}), because they contribute only zeros. Call it before any "
            "rank joins."
        )

    def _end(self, name: str, *, forget: bool) -> None:
        self._pending.pop(name, None)
        self._unannounced.pop(name, None)
        slot = self._slot_of[name]
        self._bits &= ~(1 << slot)
        if forget:
            self._forget(slot)

    def _record_launch(self, entry: _Entry) -> None:
        """Record how ranks described the request just launched."""
        entry.used = self._round
        active = [r for r in range(self._size) if r not in self._joined]
        first = entry.of(active[0])
        if entry.variants and all(entry.of(r) == first for r in active[1:]):
            entry.base, entry.variants = first, {}

    def _register(self, request: Request) -> int:
        set_id = -1
        if request.kind is CollectiveKind.REGISTER:
            set_id, self._next_set = self._next_set, self._next_set + 1
            self._sets[set_id] = _SetState(request)
        elif request.kind is CollectiveKind.UNREGISTER:
            del self._sets[request.shape[0]]
        return set_id

    def _decide_sets(self, section: int, decisions: list[Decision]) -> None:
        for set_id, state in list(self._sets.items()):
            members = (1 << state.members) - 1
            vote, in_order, whole = section & 1, section >> 1 & 1, section >> 2 & 1
            section >>= _SET_BITS
            ready = section & members & ~state.launched
            unused = section >> state.members & members
            section >>= 2 * state.members
            if ready:
                state.launched |= ready
                decisions.append(LaunchMembers(set_id, tuple(_bits_of(ready))))
            if vote:
                decisions.append(
                    EndStep(set_id, bool(in_order), bool(whole), unused),
                )
                self._sets[set_id] = _SetState(state.request)

    def _enter_joined(
        self, announcements: Sequence[bytes], decisions: list[Decision]
    ) -> None:
        now = {
            rank
            for rank, text in enumerate(announcements)
            if json.loads(text or b"{}").get("join")
        }
        if not now:
            return
        self._joined |= now
        if self._rank in now:
            self._wants_join = False
        if len(self._joined) == self._size:
            self._joined = set()
            decisions.append(EndJoin(max(now)))

    def _entry_of(self, name: str) -> _Entry:
        return self._entry(self._slot_of[name])

    def _entry(self, slot: int) -> _Entry:
        entry = self._slots[slot]
        if entry is None:
            raise AssertionError(f"slot {slot} is empty")
        return entry


def _number_and_name(request: Request) -> tuple[int, str]:
    """Return a key by which ``a.10`` comes after ``a.9``."""
    return len(request.name), request.name


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _bits_of(bits: int) -> list[int]:
    """Return the positions of set bits, ascending."""
    text = bin(bits)[:1:-1]
    return [i for i, digit in enumerate(text) if digit == "1"]
