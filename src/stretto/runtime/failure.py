"""One clear message when a collective fails: what failed, and who is gone."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.runtime.agreement import Ranks

_log = logging.getLogger(__name__)

_ROLL_CALL_S = 5.0
_POLL_S = 0.05

_TIMED_OUT = ("timed out", "timeout", "took too long")
_TRANSPORT = (
    "gloo/transport",
    "gloo/rendezvous",
    "gloo/common/store",
    "wait timeout after",  # the store's, for a peer that never came
)


def is_communication_error(exc: BaseException) -> bool:
    """Whether an error comes from the transport below a collective."""
    text = str(exc)
    return any(mark in text for mark in _TRANSPORT)


@final
class FailureDesk:
    """Turns the first failure of a model's communication into its one error.

    A closed connection names a neighbour's address, and often that neighbour only
    ended because its own neighbour died. So each rank that fails writes its name
    into the store, closes its connections (which lets the next ones fail at once
    rather than at their time-out), and waits a few seconds for the others' names:
    whoever does not write is gone or stuck. Nothing of this runs before a failure.
    """

    def __init__(self, ranks: Ranks, abort: Callable[[], None]) -> None:
        self._ranks = ranks
        self._abort = abort
        self._lock = threading.Lock()
        self.error: CommTimeout | None = None

    def report(self, place: str, cause: BaseException) -> CommTimeout:
        """The error to raise: the same one for every later failure."""
        with self._lock:
            if self.error is None:
                self.error = self._diagnose(place, cause)
                self.error.__cause__ = cause
            return self.error

    def others_failed(self) -> bool:
        """Whether another rank has signed that its communication failed."""
        store = PrefixStore("failed", self._ranks.store)
        others = (r for r in range(self._ranks.size) if r != self._ranks.rank)
        try:
            return any(store.check([str(rank)]) for rank in others)
        except RuntimeError:
            return True  # the store went with the process that held it

    def _diagnose(self, place: str, cause: BaseException) -> CommTimeout:
        silent, store_error = self._call_the_roll(place)
        ranks = self._ranks
        text = str(cause).lower()
        if any(word in text for word in _TIMED_OUT):
            what = f"did not end within {ranks.timeout_s:g} s"
        else:
            what = "lost its connection"
        if store_error is not None:
            who = (
                f"the store, which {ranks.name(0)} or the launcher holds, does not "
                f"answer ({store_error}): {ranks.name(0)} is gone, or the network is"
            )
        elif silent:
            verb = "is" if len(silent) == 1 else "are"
            others = ", all others answered" if len(silent) < ranks.size - 1 else ""
            who = (
                f"{ranks.name_all(silent)} {verb} gone or stuck (no answer in "
                f"{_ROLL_CALL_S:g} s){others}"
            )
        else:
            who = (
                "every rank still answers: the network between them failed, or ranks "
                "make different calls, such as a backward or step that one left out"
            )
        where = f"Look at the log of {ranks.name_all(silent)} first. " if silent else ""
        cause_line = (str(cause) or type(cause).__name__).splitlines()[0]
        cause_line = cause_line.partition(" This is typically caused by")[0]
        return CommTimeout(
            f"{ranks.name(ranks.rank)}: {place} {what}; {who}. {where}"
            f"Cause: {cause_line}"
        )

    def _call_the_roll(self, place: str) -> tuple[list[int], str | None]:
        """Ranks that do not answer, and what is wrong with the store if it is."""
        ranks = self._ranks
        silent = [r for r in range(ranks.size) if r != ranks.rank]
        trouble: list[str] = []
        # In threads that may be left behind: neither closing connections nor asking
        # a store whose host is gone can be told to end in time.
        aborting = threading.Thread(
            target=self._abort, name="stretto-failure-abort", daemon=True
        )
        asking = threading.Thread(
            target=self._ask,
            args=(place, silent, trouble),
            name="stretto-failure-roll-call",
            daemon=True,
        )
        deadline = time.perf_counter() + _ROLL_CALL_S
        asking.start()
        aborting.start()
        asking.join(max(0.0, deadline - time.perf_counter()) + 1.0)
        if asking.is_alive() and not trouble:
            trouble.append(f"no answer in {_ROLL_CALL_S:g} s")
        # A first rank that has answered and then took the store with it, having
        # finished its own roll call, is not what went wrong.
        store_matters = bool(trouble) and 0 in silent
        return list(silent), trouble[0] if store_matters else None

    def _ask(self, place: str, silent: list[int], trouble: list[str]) -> None:
        ranks = self._ranks
        try:
            store = PrefixStore("failed", ranks.store)
            store.set(str(ranks.rank), place)
            deadline = time.perf_counter() + _ROLL_CALL_S
            while silent and time.perf_counter() < deadline:
                silent[:] = [r for r in silent if not store.check([str(r)])]
                time.sleep(_POLL_S)
        except RuntimeError as exc:
            trouble.append(str(exc).splitlines()[0])
