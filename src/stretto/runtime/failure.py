"""One clear message when a collective fails: what failed, and who is gone."""

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
from stretto.runtime.agreement import end_requests, who_is_gone
from stretto.runtime.presence import State, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.agreement import Ranks

_ROLL_CALL_S = 5.0
_LEAST_ROLL_CALL_S = 1.0
_POLL_S = 0.05
_LOOK_EVERY = timedelta(seconds=1)
_ANSWER_S = 0.5
_OTHERS_ENDED_S = 0.2
"""How long a roll call goes on for more of those that ended, once one is found."""

_LATE_S = 3.0
"""What a rank has sent before it ended may arrive so much later."""

SIGN = "stretto-lost"
"""The name of a thread that has found who is lost, for ranks of the same host."""

_TIMED_OUT = ("timed out", "timeout", "took too long")


@final
class FailureDesk:
    """Turns the first failure of a model's communication into its one error.

    A closed connection names a neighbour's address, and often that neighbour only
    ended because its own neighbour died. So each rank that fails writes its name
    into the store, closes its connections (which lets the next ones fail at once
    rather than at their time-out), and waits a few seconds for the others' names.
    Of those that do not write, it names the ones whose processes have ended; where
    there are none, all of them, and what is known of their processes. Nothing of this
    runs before a failure.
    """

    def __init__(
        self,
        ranks: Ranks,
        abort: Callable[[], None],
        *,
        key: Callable[[], str] = str,
    ) -> None:
        """Prepare.

        Args:
            ranks: Whose communication it is.
            abort: Closes this rank's connections.
            key: What tells the model from others of these ranks, whose failures are
                not this one's: equal on all ranks, and asked for at a failure.
        """
        self._ranks = ranks
        self._abort = abort
        self._key = key
        self._lock = threading.Lock()
        self._watch = Wait(ranks.presence, every_s=1.0, grace_s=_LATE_S)
        self._asking: threading.Thread | None = None
        self._heard: str | None = None
        self.error: CommTimeout | None = None

    def report(self, place: str, cause: BaseException) -> CommTimeout:
        """The error to raise: the same one for every later failure."""
        with self._lock:
            if self.error is None and isinstance(cause, CommTimeout):
                # It names who is lost already: the others are told, nobody is asked.
                _RollCall(self._ranks, self._store(), place, 0.0).make(self._abort)
                self.error = cause
            if self.error is None:
                self.error = self._diagnose(place, cause)
                self.error.__cause__ = cause
            return self.error

    def wait(self, work: Any, place: str) -> None:
        """Wait for a collective of the model's own group.

        The group's connections are not ours to close, so a rank that waits for one
        which has already given up would wait on: it looks into the store meanwhile.

        Raises:
            CommTimeout: it failed, or can't end.
        """
        while True:
            try:
                work.wait(_LOOK_EVERY)
            except RuntimeError as exc:
                if work.is_completed():
                    raise self.report(place, exc) from exc
            else:
                return
            why = self.others_failed()
            if why is not None:
                raise self.report(place, RuntimeError(why))

    def others_failed(self) -> str | None:
        """Why a wait for other ranks is in vain; ``None``: it may not be.

        Another rank has signed that its communication failed, or its process has ended
        some time ago.
        """
        if self._asking is None:
            self._asking = threading.Thread(
                target=self._ask_for_others, name="stretto-store", daemon=True
            )
            self._asking.start()
        # A store whose process is stopped does not answer: then the collective's own
        # time-out ends the wait.
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
        except RuntimeError:  # the store went with the process that held it
            self._heard = "the store that the first rank or the launcher holds is gone"

    def _store(self) -> Store:
        return PrefixStore(f"failed/{self._key()}", self._ranks.store)

    @property
    def _roll_call_s(self) -> float:
        return min(_ROLL_CALL_S, max(_LEAST_ROLL_CALL_S, self._ranks.timeout_s / 4))

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
            who = who_is_gone(ranks, call.gone, call.ended)
        elif call.store_error is not None:
            who = (
                f"the store, which {ranks.name(0)} or the launcher holds, does not "
                f"answer ({call.store_error}): "
            )
            if self._lives(0):
                who += self._unanswered([r for r in call.silent if self._lives(r)])
            else:
                who += (
                    f"{ranks.name(0)} is gone, or the network is. Look at the log of "
                    f"{ranks.name(0)} first."
                )
        elif silent:
            who = self._unanswered(silent)
        else:
            who = (
                "every rank still answers: the network between them failed, or ranks "
                "make different calls, such as a backward or step that one left out."
            )
        cause_line = (str(cause) or type(cause).__name__).splitlines()[0]
        cause_line = cause_line.partition(" This is typically caused by")[0]
        return CommTimeout(
            f"{ranks.name(ranks.rank)}: {place} {what}; {who} Cause: {cause_line}"
        )

    def _lives(self, rank: int) -> bool:
        """Whether a rank's process is known to be there."""
        presence = self._ranks.presence
        here = (State.RUNS, State.STOPPED)
        return presence is not None and (
            presence.state(self._ranks.names[rank]) in here
        )

    def _unanswered(self, silent: list[int]) -> str:
        """Return what to say of ranks that are not known to have ended."""
        ranks = self._ranks
        verb = "is" if len(silent) == 1 else "are"
        others = ", all others answered" if len(silent) < ranks.size - 1 else ""
        rows: list[str] = []
        if ranks.presence is not None:
            names = [ranks.names[r] for r in silent]
            rows = [row for row in map(ranks.presence.describe, names) if row]
        word = "late or stuck" if all(map(self._lives, silent)) else "gone or stuck"
        known = "".join(f"; {row}" for row in rows)
        return (
            f"{ranks.name_all(silent)} {verb} {word} (no answer in "
            f"{self._roll_call_s:g} s{known}){others}. Look at the log of "
            f"{ranks.name_all(silent)} first."
        )


@final
class _RollCall:
    """One rank's question who else is there, after its communication failed."""

    def __init__(self, ranks: Ranks, store: Store, place: str, limit_s: float) -> None:
        self._ranks = ranks
        self._store = store
        self._place = place
        self._limit_s = limit_s
        self._trouble: str | None = None
        self._signed = False
        self.silent = [r for r in range(ranks.size) if r != ranks.rank]
        """Ranks that have not signed."""

        self.ended: dict[int, str] = {}
        """How processes ended, by the ranks' global numbers."""

    @property
    def gone(self) -> list[int]:
        """Silent ranks whose processes have ended."""
        return [r for r in self.silent if self._ranks.names[r] in self.ended]

    @property
    def store_error(self) -> str | None:
        """What is wrong with the store.

        A first rank that has answered and then took the store with it, having finished
        its own roll call, is not what went wrong.
        """
        return self._trouble if 0 in self.silent else None

    def make(self, abort: Callable[[], None]) -> None:
        """Close connections, sign, and ask."""
        # In threads that may be left behind: neither closing connections nor asking
        # a store whose host is gone can be told to end in time.
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
            # The connection is of no use any more, and a thread that came back while
            # the interpreter is being finalized would end the process.
            end_requests(self._ranks.store)
            asking.join(1.0)
        self.silent = list(self.silent)  # what a thread left behind does not change
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
                # Processes that end later do so because of the ones found here.
                self._look()
            if self.gone:
                self._sign_here()
                found_s = min(found_s, time.perf_counter())
                late = time.perf_counter() > found_s + _OTHERS_ENDED_S
                if late and not self._others_need_this_rank():
                    return
            elif self._trouble is not None and self._nobody_to_see():
                return
            time.sleep(_POLL_S)

    def _sign_here(self) -> None:
        """Let ranks of this host see, without the store, that this one has found it."""
        if not self._signed:
            self._signed = True
            with contextlib.suppress(OSError):
                name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
                name.write_text(SIGN)

    def _hear(self) -> None:
        if self._trouble is not None:
            return
        try:
            self.silent = [r for r in self.silent if not self._store.check([str(r)])]
        except RuntimeError as exc:
            self._trouble = str(exc).splitlines()[0]

    def _look(self) -> None:
        """Look for the processes of silent ranks, here and by others' eyes."""
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
            presence.tell_ended(new)
            self.ended |= presence.told_ended(names)

    def _others_need_this_rank(self) -> bool:
        """Whether another rank has yet to see that this one lived.

        It would take this one's end for the cause. With a store it finds what this
        rank signed there, unless the first rank takes the store away with it; without,
        it has to see this rank's process.
        """
        presence, ranks = self._ranks.presence, self._ranks
        if presence is None:
            return False
        left = [r for r in self.silent if r not in self.gone]
        states = {r: presence.state(ranks.names[r]) for r in left}
        if self._trouble is None:
            here = (State.RUNS, State.UNKNOWN)
            return ranks.rank == 0 and any(state in here for state in states.values())
        return any(
            state is State.RUNS and not presence.signs(ranks.names[r], SIGN)
            for r, state in states.items()
        )

    def _nobody_to_see(self) -> bool:
        """Whether no silent rank's process can be looked for from here."""
        presence, ranks = self._ranks.presence, self._ranks
        return presence is None or all(
            presence.state(ranks.names[r]) is State.UNKNOWN for r in self.silent
        )
