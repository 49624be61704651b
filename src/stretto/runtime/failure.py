"""Report one clear error when a collective fails: what failed, which rank is lost."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout
from stretto.process_identity import ProcessState
from stretto.runtime.backends.base import LaneFailure
from stretto.runtime.presence import Wait
from stretto.runtime.store import end_requests, loss_message, store_listens
from stretto.runtime.waits import MOMENT, OVER, why_endless

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.ranks import Ranks

_ROLL_CALL_S = 5.0
_MIN_ROLL_CALL_S = 1.0
_POLL_S = 0.05
_LOOK_EVERY = timedelta(seconds=1)
_ANSWER_S = 0.5
_OTHERS_ENDED_S = 0.2
"""How long a roll call continues to look for ended ranks after it has found one."""

_LATE_S = 3.0
"""Data sent by a rank before it ended may arrive this much later."""

SIGN = "stretto-lost"
"""Name of a thread that has found the lost rank, visible to ranks on the same host."""

_STORE_GONE = "the store, held by the first rank or the launcher, is gone"

_TIMED_OUT = ("timed out", "timeout", "took too long")


@final
class FailureReporter:
    """Turns the first failure of a model's communication into its one error.

    A closed connection names a neighbor's address, and often that neighbor ended only
    because its own neighbor died. So each rank that fails writes its name into the
    store, closes its connections (which makes the next ones fail at once rather than at
    their timeout), and waits a few seconds for the others' names. Among the ranks that
    do not write, it names those whose processes have ended; otherwise it names all of
    them, with what is known of their processes. None of this runs before a failure.
    """

    def __init__(
        self,
        ranks: Ranks,
        abort: Callable[[], None],
        *,
        key: Callable[[], str] = str,
        hand_over: Callable[[], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            ranks: The communicating ranks.
            abort: Closes this rank's connections.
            key: Separates the model from others of these ranks, whose failures do not
                concern it: equal on all ranks, and called at a failure.
            hand_over: If given, it is called at a failure instead of a search for the
                lost rank: another part of the program knows it, and training continues
                with other ranks.
        """
        self._ranks = ranks
        self._abort = abort
        self._key = key
        self._hand_over = hand_over
        self._lock = threading.Lock()
        self._look_at_s = 0.0
        self._watch = Wait(ranks.presence, every_s=1.0, grace_s=_LATE_S)
        self._asking: threading.Thread | None = None
        self._heard: str | None = None
        self._store_gone = ""
        self.error: CommTimeout | None = None

    def report(self, place: str, cause: BaseException) -> CommTimeout:
        """Return the error to raise: the same one for every later failure."""
        with self._lock:
            if self.error is None and self._hand_over is not None:
                self._abort()
                self._hand_over()
                self.error = CommTimeout(
                    f"{self._ranks.name(self._ranks.rank)}: {place} lost its "
                    f"connection. Cause: {_first_line(cause)}"
                )
                self.error.__cause__ = cause
            if (
                self.error is None
                and isinstance(cause, CommTimeout)
                and not isinstance(cause, LaneFailure)
            ):
                # The error already names the lost rank: inform the others, without a
                # wait.
                _RollCall(self._ranks, self._store(), place, 0.0).make(self._abort)
                self.error = cause
            if self.error is None:
                self.error = self._diagnose(place, cause)
                self.error.__cause__ = cause
            return self.error

    def wait(self, work: Any, place: str) -> None:
        """Wait for a collective.

        Connections do not always end with a rank: this rank can't close those of the
        model's own group, and a lost rank's child process may hold them open. So the
        store and the ranks' processes are checked about once a second.

        Raises:
            CommTimeout: it failed, or can't end.
        """
        every = _LOOK_EVERY if self._hand_over is None else MOMENT
        try:
            why = why_endless(work, self._why_endless, every)
        except RuntimeError as exc:
            raise self.report(place, exc) from exc
        if why:
            raise self.report(place, RuntimeError(why))

    def _why_endless(self) -> str | None:
        """See Note [Sends that Gloo never ends] in `waits`."""
        if self._ranks.is_over():
            return OVER
        now_s = time.perf_counter()
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_EVERY.total_seconds()
        return self.others_failed()

    def others_failed(self) -> str | None:
        """Return why a wait for other ranks can't succeed, or ``None`` if it may.

        Either another rank has reported that its communication failed, or its process
        ended some time ago.
        """
        if self._asking is None:
            self._asking = threading.Thread(
                target=self._ask_for_others, name="stretto-store", daemon=True
            )
            self._asking.start()
        # A store whose process is stopped does not answer; then the collective's own
        # timeout ends the wait.
        self._asking.join(_ANSWER_S)
        if not self._asking.is_alive():
            self._asking = None
            if self._heard is not None:
                return self._heard
        lost = self._watch.lost(self._ranks.names)
        return "; ".join(lost.values()) or None

    def _ask_for_others(self) -> None:
        try:
            if self._store().check(["any"]):
                self._heard = "another rank has given up"
        except RuntimeError:
            # A firewall may have dropped this rank's idle connection. Without one, only
            # processes are checked.
            if not store_listens(self._ranks.store):
                self._heard = self._store_gone = _STORE_GONE

    def _store(self) -> Store:
        return PrefixStore(f"failed/{self._key()}", self._ranks.store)

    @property
    def _roll_call_s(self) -> float:
        return min(_ROLL_CALL_S, max(_MIN_ROLL_CALL_S, self._ranks.timeout_s / 4))

    def _diagnose(self, place: str, cause: BaseException) -> CommTimeout:
        call = _RollCall(self._ranks, self._store(), place, self._roll_call_s)
        call.make(self._abort)
        ranks, silent = self._ranks, call.silent
        text = str(cause).lower()
        if any(word in text for word in _TIMED_OUT):
            what = f"did not end within {ranks.timeout_s:g} s"
        else:
            what = "lost its connection"
        if call.gone:
            who = loss_message(ranks, call.gone, call.ended)
        elif self._store_gone:
            who = f"ranks can't learn of each other. Check the log of {ranks.name(0)}."
        elif call.store_error is not None:
            who = (
                f"the store, held by {ranks.name(0)} or the launcher, does not "
                f"answer ({call.store_error}): "
            )
            if self._is_alive(0):
                who += self._unanswered([r for r in call.silent if self._is_alive(r)])
            else:
                who += (
                    f"{ranks.name(0)} is gone, or the network is. Check the log of "
                    f"{ranks.name(0)} first."
                )
        elif silent:
            who = self._unanswered(silent)
        else:
            elsewhere: dict[str, list[int]] = {}
            for rank, at in sorted(call.places.items()):
                elsewhere.setdefault(at, []).append(rank)
            elsewhere.pop(place, None)
            rows = [f"{ranks.name_all(r)}: {at}" for at, r in elsewhere.items()]
            known = f" ({'; '.join(rows)})" if rows else ""
            who = (
                f"every rank still answers{known}: the network between them failed, or "
                "ranks make different calls, such as a backward, step or norm that one "
                "skipped."
            )
        return CommTimeout(
            f"{ranks.name(ranks.rank)}: {place} {what}; {who} "
            f"Cause: {_first_line(cause)}"
        )

    def _is_alive(self, rank: int) -> bool:
        """Return whether a rank's process is known to exist."""
        presence = self._ranks.presence
        here = (ProcessState.RUNS, ProcessState.STOPPED)
        return presence is not None and (
            presence.state(self._ranks.names[rank]) in here
        )

    def _unanswered(self, silent: list[int]) -> str:
        """Return the message about ranks that are not known to have ended."""
        ranks = self._ranks
        verb = "is" if len(silent) == 1 else "are"
        others = ", all others answered" if len(silent) < ranks.size - 1 else ""
        rows: list[str] = []
        if ranks.presence is not None:
            names = [ranks.names[r] for r in silent]
            rows = [row for row in map(ranks.presence.describe, names) if row]
        word = "late or stuck" if all(map(self._is_alive, silent)) else "gone or stuck"
        known = "".join(f"; {row}" for row in rows)
        return (
            f"{ranks.name_all(silent)} {verb} {word} (no answer in "
            f"{self._roll_call_s:g} s{known}){others}. Check the log of "
            f"{ranks.name_all(silent)} first."
        )


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was handled, and of its causes.

    Their frames refer to works, lanes and groups, and often to the error itself. Such a
    cycle would keep threads and connections until garbage collection.
    """
    left, seen = [error], set()
    while left:
        now = left.pop()
        if now is not None and id(now) not in seen:
            seen.add(id(now))
            now.__traceback__ = None
            left += [now.__cause__, now.__context__]


def _first_line(cause: BaseException) -> str:
    line = (str(cause) or type(cause).__name__).splitlines()[0]
    return line.partition(" This is typically caused by")[0]


@final
class _RollCall:
    """One rank's search for the others, after its communication failed."""

    def __init__(self, ranks: Ranks, store: Store, place: str, limit_s: float) -> None:
        self._ranks = ranks
        self._store = store
        self._place = place
        self._limit_s = limit_s
        self._trouble: str | None = None
        self._signed = False
        self.silent = [r for r in range(ranks.size) if r != ranks.rank]
        """Ranks that have not signed."""

        self.places: dict[int, str] = {}
        """The operations that failed on the ranks that have signed."""

        self.ended: dict[int, str] = {}
        """How processes ended, by the ranks' global numbers."""

    @property
    def gone(self) -> list[int]:
        """Silent ranks whose processes have ended."""
        return [r for r in self.silent if self._ranks.names[r] in self.ended]

    @property
    def store_error(self) -> str | None:
        """The store's error, if it matters.

        It does not matter if the first rank has answered: that rank finished its own
        roll call and then ended the store.
        """
        return self._trouble if 0 in self.silent else None

    def make(self, abort: Callable[[], None]) -> None:
        """Close connections, sign, and look for the others."""
        # Use threads that may be abandoned: neither closing connections nor querying a
        # store whose host is gone is certain to end in time.
        aborting = threading.Thread(
            target=abort, name="stretto-failure-abort", daemon=True
        )
        asking = threading.Thread(
            target=self._ask, name="stretto-failure-roll-call", daemon=True
        )
        asking.start()
        aborting.start()
        asking.join(self._limit_s + 1.0)
        if asking.is_alive() and self._trouble is None:
            self._trouble = f"no answer in {self._limit_s:g} s"
            # The connection is unusable, and a thread that returned while the
            # interpreter is finalizing would end the process.
            end_requests(self._ranks.store)
            asking.join(1.0)
        self.silent = list(self.silent)  # an abandoned thread can't change them
        self.places = dict(self.places)
        self.ended = dict(self.ended)

    def _ask(self) -> None:
        deadline = time.perf_counter() + self._limit_s
        try:
            self._store.set(str(self._ranks.rank), self._place)
            self._store.set("any", str(self._ranks.rank))
        except RuntimeError as exc:
            self._trouble = str(exc).splitlines()[0]
        found_s = math.inf
        while self.silent and time.perf_counter() < deadline:
            self._hear()
            if time.perf_counter() <= found_s + _OTHERS_ENDED_S:
                # Processes that end later do so because of the ones already found.
                self._look()
            if self.gone:
                self._sign_here()
                found_s = min(found_s, time.perf_counter())
                late = time.perf_counter() > found_s + _OTHERS_ENDED_S
                if late and not self._others_need_this_rank():
                    return
            elif self._trouble is not None and self._none_visible():
                return
            time.sleep(_POLL_S)

    def _sign_here(self) -> None:
        """Show ranks of this host, without the store, that this rank has found it."""
        if not self._signed:
            self._signed = True
            with contextlib.suppress(OSError):
                name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
                name.write_text(SIGN)

    def _hear(self) -> None:
        if self._trouble is not None:
            return
        try:
            for rank in self.silent:
                if self._store.check([str(rank)]):
                    place = self._store.get(str(rank)).decode()
                    self.places = self.places | {rank: place}
                    self.silent = [r for r in self.silent if r != rank]
        except RuntimeError as exc:
            self._trouble = str(exc).splitlines()[0]

    def _look(self) -> None:
        """Look for silent ranks' processes, here and through other ranks' reports."""
        presence, ranks = self._ranks.presence, self._ranks
        if presence is None:
            return
        names = [ranks.names[r] for r in self.silent]
        here = presence.ended(names)
        new = here.keys() - self.ended.keys()
        self.ended |= here
        if self._trouble is not None:
            return
        with contextlib.suppress(RuntimeError):
            presence.report_ended(new)
            self.ended |= presence.reported_ended(names)

    def _others_need_this_rank(self) -> bool:
        """Return whether another rank still has to see that this rank lived.

        Otherwise it would take this rank's end for the cause. With a store it finds
        this rank's signature there, unless the first rank ends the store; without a
        store, it has to see this rank's process.
        """
        presence, ranks = self._ranks.presence, self._ranks
        if presence is None:
            return False
        left = [r for r in self.silent if r not in self.gone]
        states = {r: presence.state(ranks.names[r]) for r in left}
        if self._trouble is None:
            here = (ProcessState.RUNS, ProcessState.UNKNOWN)
            return ranks.rank == 0 and any(state in here for state in states.values())
        return any(
            state is ProcessState.RUNS and not presence.has_thread(ranks.names[r], SIGN)
            for r, state in states.items()
        )

    def _none_visible(self) -> bool:
        """Return whether no silent rank's process is visible from here."""
        presence, ranks = self._ranks.presence, self._ranks
        return presence is None or all(
            presence.state(ranks.names[r]) is ProcessState.UNKNOWN for r in self.silent
        )
