"""Detect ended ranks by their processes rather than by silence.

# Note [Evidence that a rank is lost]
A rank that does not answer may be dead, stopped, or busy with a long forward. So each
rank publishes once which process it is: host, process id, and when that process
started, because ids are reused. A rank that then misses a rank on its own host checks
whether that process exists, and publishes the result for ranks on other hosts. A
process that does not exist, or that is a zombie, has certainly ended; nothing is
concluded from silence.

A process that ends with an exception notes it in the store before it exits. Others then
report what ended it, and can distinguish it from a rank that ended only because its own
collective failed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout
from stretto.process_identity import Identity, ProcessState, own_identity, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.distributed_c10d import Store

_PROC = Path("/proc")
_NOTE_S = 1.0
"""Maximum wait of an ending process for the store to take its note."""

_NOTE_CHARACTERS = 200

_LOOK_EVERY_S = 0.5
_END_S = 1.0

_TRANSPORT = (
    "gloo/transport",
    "gloo/rendezvous",
    "gloo/common/store",
    "wait timeout after",  # the store's, for a peer that never arrived
)


def is_communication_error(exc: BaseException) -> bool:
    """Return whether an error comes from the transport of a collective."""
    text = str(exc)
    return any(mark in text for mark in _TRANSPORT)


@final
class Presence:
    """The processes of a process group's ranks, by the ranks' global numbers."""

    def __init__(self, store: Store, *, rank: int) -> None:
        """Prepare; ``rank`` is this process's global number."""
        self._store: Any = PrefixStore("presence", store)
        self._rank = rank
        self._known: dict[int, Identity] = {}
        self._ended: dict[int, str] = {}

    def publish(self) -> None:
        """Publish in the store which process this rank is."""
        mine = own_identity()
        self._store.set(f"who/{self._rank}", json.dumps(asdict(mine)))
        _all.add(self)

    def learn(self, ranks: Iterable[int]) -> None:
        """Read which processes ``ranks`` are, as far as they have published it.

        Known processes can be checked without the store, which may be lost with the
        rank that holds it.
        """
        for rank in ranks:
            if rank != self._rank and rank not in self._known:
                self._read(rank)

    def state(self, rank: int) -> ProcessState:
        """Return the state of a rank's process as seen by this one."""
        known = self._known.get(rank)
        return ProcessState.UNKNOWN if known is None else state_of(known)

    def ended(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return how the ended ones of ``ranks`` ended, for messages."""
        others = [rank for rank in ranks if rank != self._rank]
        # If the store is lost, use what is already known.
        with contextlib.suppress(RuntimeError):
            self.learn(others)
        return {rank: how for rank in others if (how := self._how(rank)) is not None}

    def report_ended(self, found: Iterable[int]) -> None:
        """Publish the ended ranks for ranks on other hosts."""
        for rank in found:
            self._store.set(f"ended/{rank}", self._ended[rank])

    def reported_ended(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ended ranks that ranks on other hosts have published."""
        return {
            rank: self._store.get(f"ended/{rank}").decode()
            for rank in ranks
            if self._store.check([f"ended/{rank}"])
        }

    def has_thread(self, rank: int, name: str) -> bool:
        """Return whether a rank's process on this host has a thread of that name."""
        known = self._known.get(rank)
        if known is None or state_of(known) is not ProcessState.RUNS:
            return False
        try:
            tasks = list((_PROC / str(known.pid) / "task").iterdir())
        except OSError:
            return False
        for task in tasks:
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().strip() == name:
                    return True
        return False

    def describe(self, rank: int) -> str:
        """Return a rank's process, host and state; empty if unknown."""
        known = self._known.get(rank)
        if known is None:
            return ""
        state = state_of(known)
        place = f"process {known.pid} on {known.host}"
        return place if state is ProcessState.UNKNOWN else f"{place} {state.value}"

    def causes(self, ended: Sequence[int]) -> list[int] | None:
        """Return the ended ranks that did not end because of another.

        A rank that ended because a collective failed is not a cause if there is another
        rank; one that ended with its own exception is named first. ``None`` if several
        have ended and the store, which knows why, is lost.
        """
        try:
            notes = {rank: self._read_note(rank) for rank in ended}
        except RuntimeError:
            return list(ended) if len(ended) == 1 else None
        own = [r for r, note in notes.items() if note and not note["follows"]]
        unexplained = [r for r, note in notes.items() if note is None]
        return own or unexplained or list(ended)

    def note_exception(self, exc: BaseException) -> None:
        """Store the exception that ends this process."""
        line = (str(exc) or type(exc).__name__).splitlines()[0][:_NOTE_CHARACTERS]
        follows = isinstance(exc, CommTimeout) or is_communication_error(exc)
        note = {"what": f"{type(exc).__name__}: {line}", "follows": follows}
        self._store.set(f"note/{self._rank}", json.dumps(note))

    def _read(self, rank: int) -> Identity | None:
        """Read a rank's identity again."""
        if not self._store.check([f"who/{rank}"]):
            return None
        fields = json.loads(self._store.get(f"who/{rank}"))
        self._known[rank] = Identity(**fields)
        return self._known[rank]

    def _how(self, rank: int) -> str | None:
        if rank in self._ended:
            return self._ended[rank]
        known = self._known.get(rank)
        if known is None or state_of(known) is not ProcessState.ENDED:
            return None
        try:
            # A rank restarted in the same job has published its identity again.
            now = self._read(rank)
        except RuntimeError:
            now = known
        if now is not None and now != known:
            return None
        note = self._note(rank)
        place = f"process {known.pid} on {known.host} has ended"
        self._ended[rank] = place if note is None else f"{place}: {note['what']}"
        return self._ended[rank]

    def _note(self, rank: int) -> dict[str, Any] | None:
        with contextlib.suppress(RuntimeError):
            return self._read_note(rank)
        return None

    def _read_note(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank noted at its end.

        Raises:
            RuntimeError: the store is lost.
        """
        if not self._store.check([f"note/{rank}"]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(f"note/{rank}"))
        return found


@final
class Wait:
    """Reports to a waiting loop when an awaited rank can no longer arrive.

    Processes are checked about once in ``every_s``. A rank that has ended may have done
    its part before, and its data may still be in transit, so it counts as lost only if
    it is found ended ``grace_s`` after the first time.
    """

    def __init__(
        self, presence: Presence | None, *, every_s: float = 0.2, grace_s: float = 0.0
    ) -> None:
        self._presence = presence
        self._every_s = every_s
        self._grace_s = grace_s
        self._next_s = time.perf_counter() + every_s
        self._first_s: dict[int, float] = {}

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the lost ones of ``ranks`` (global numbers), and how they ended."""
        now_s = time.perf_counter()
        if self._presence is None or now_s < self._next_s:
            return {}
        self._next_s = now_s + self._every_s
        ended = self._presence.ended(ranks)
        for rank in ended:
            self._first_s.setdefault(rank, now_s)
        return {
            rank: how
            for rank, how in ended.items()
            if now_s - self._first_s[rank] >= self._grace_s
        }


def call_aside(
    call: Callable[[], Any],
    *,
    name: str,
    look: Callable[[], bool],
    give_up: Callable[[], None] = lambda: None,
) -> tuple[bool, Any]:
    """Call in a thread that is abandoned once ``look`` returns True.

    ``look`` is called about twice a second during the call. ``give_up`` may make the
    call fail, which then has a second to end.

    Returns:
        Whether the call ended, and its result.

    Raises:
        Exception: the call's own exception.
    """
    found: list[Any] = []
    failed: list[Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except Exception as exc:  # noqa: BLE001 - raised again below
            failed.append(exc)
        ended.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    while not ended.wait(_LOOK_EVERY_S):
        if look() and not ended.is_set():
            give_up()
            ended.wait(_END_S)
            return False, None
    if failed:
        raise failed.pop()  # in no cycle with this frame, which its traceback has
    return True, found[0]


_all: weakref.WeakSet[Presence] = weakref.WeakSet()


def _note_at_exit() -> None:
    """Store the exception that ends this process, for the other ranks."""
    exc = getattr(sys, "last_value", None)
    presences = list(_all)
    if exc is None or not presences:
        return

    def note() -> None:
        for presence in presences:
            try:
                presence.note_exception(exc)
            except RuntimeError:  # the store was lost with the rank that holds it
                return

    # The store may be on a lost host, and then does not answer for minutes.
    thread = threading.Thread(target=note, name="stretto-store", daemon=True)
    thread.start()
    thread.join(_NOTE_S)


atexit.register(_note_at_exit)
