"""Clocks of several hosts, laid on each other.

`time.perf_counter` counts from the start of a host, so two hosts' values have nothing
to do with each other. A rank asks the reference rank for its time and gets an answer;
the reference's clock was read between the asking and the answer, which bounds the
offset from both sides. What bounds it best of many askings is kept.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

DRIFT_RATIO = 200e-6
"""What two hosts' clocks may drift apart, per second.

Crystals keep 50 in a million, and what corrects them over the network (NTP) slews by
some 100 more in quiet operation.
"""

_GOOD_BOUND_S = 100e-6
_MOST_ASKINGS = 64
_MOST_S = 2.0
_ANSWER_S = 1.0
_POLL_S = 0.005
_END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One question for the reference's time, all in seconds."""

    asked_s: float
    """On the asking rank's clock."""

    reference_s: float
    """On the reference's clock, between the other two moments."""

    answered_s: float
    """On the asking rank's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPoint:
    """How far the reference's clock is ahead of a rank's at one moment."""

    at_s: float
    """On the rank's clock."""

    offset_s: float
    """Reference less rank."""

    bound_s: float
    """The offset is known within plus and minus this."""


def point_of(askings: Sequence[Asking]) -> ClockPoint:
    """The offset that all askings allow.

    Each asking says: the offset is at least ``reference - answered`` and at most
    ``reference - asked``. All hold together while clocks do not drift, so the offset
    lies in the intersection; its middle is taken and its half is the bound. (This is
    Cristian's method, Distributed Computing 3, 1989, with the intersection of Marzullo
    and Owicki, 1983.) Clocks that drifted so far meanwhile that nothing is left give
    the quickest asking alone.
    """
    low_s = max(a.reference_s - a.answered_s for a in askings)
    high_s = min(a.reference_s - a.asked_s for a in askings)
    if low_s > high_s:
        quickest = min(askings, key=lambda a: a.answered_s - a.asked_s)
        low_s = quickest.reference_s - quickest.answered_s
        high_s = quickest.reference_s - quickest.asked_s
    return ClockPoint(
        at_s=askings[-1].answered_s,
        offset_s=(low_s + high_s) / 2,
        bound_s=(high_s - low_s) / 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """A rank's clock laid on the reference's, from the points where it was compared.

    Between two points the offset runs straight from one to the other, which follows a
    steady drift; beyond them it stays, and the bound grows with `DRIFT_RATIO`. Without
    points both clocks are one.
    """

    points: tuple[ClockPoint, ...] = ()

    def offset_s(self, at_s: float) -> float:
        """What is to be added to the rank's time ``at_s`` to get the reference's."""
        if not self.points:
            return 0.0
        for before, after in itertools.pairwise(self.points):
            if before.at_s <= at_s <= after.at_s and before.at_s < after.at_s:
                share = (at_s - before.at_s) / (after.at_s - before.at_s)
                return before.offset_s + share * (after.offset_s - before.offset_s)
        return self._nearest(at_s).offset_s

    def bound_s(self, at_s: float) -> float:
        """How far `offset_s` may be wrong at ``at_s``.

        Between two points: the greater of their bounds, while drift is steady.
        """
        if not self.points:
            return 0.0
        for before, after in itertools.pairwise(self.points):
            if before.at_s <= at_s <= after.at_s:
                return max(before.bound_s, after.bound_s)
        nearest = self._nearest(at_s)
        return nearest.bound_s + DRIFT_RATIO * abs(at_s - nearest.at_s)

    def _nearest(self, at_s: float) -> ClockPoint:
        return min(self.points, key=lambda point: abs(at_s - point.at_s))


def clock_name() -> str:
    """Which clock this process reads: equal names read the same one.

    On Linux all processes of a host share it, unless a time namespace shifts it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return str(uuid.uuid4())


def ask_reference(store: Store, place: str) -> ClockPoint | None:
    """This rank's clock against the reference's, by asking through the store.

    ``store`` is this thread's own connection. ``None`` where nobody answered in time.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    askings: list[Asking] = []
    began_s = perf_counter()
    try:
        while len(askings) < _MOST_ASKINGS and perf_counter() - began_s < _MOST_S:
            number = len(askings)
            asked_s = perf_counter()
            store.set(f"{place}/ask/{number}", "")
            answer = store.get(f"{place}/answer/{number}")
            answered_s = perf_counter()
            reference_s = float(answer)
            askings.append(
                Asking(asked_s=asked_s, reference_s=reference_s, answered_s=answered_s)
            )
            if number and point_of(askings).bound_s < _GOOD_BOUND_S:
                break
        store.set(f"{place}/ask/{len(askings)}", _END)
        for number in range(len(askings)):
            store.delete_key(f"{place}/answer/{number}")
    except RuntimeError:  # the reference, or its store, is gone or busy
        pass
    return point_of(askings) if askings else None


def answer_rank(store: Store, place: str) -> None:
    """Answers one rank's questions for the time until it has no more.

    ``store`` is this thread's own connection.

    Raises:
        RuntimeError: the rank came no more, or the store is gone.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    for number in range(_MOST_ASKINGS + 1):
        question = store.get(f"{place}/ask/{number}")
        if question.decode() == _END:
            store.delete_key(f"{place}/ask/{number}")
            return
        store.set(f"{place}/answer/{number}", repr(perf_counter()))
        store.delete_key(f"{place}/ask/{number}")


def wait_for_keys(
    store: Store, keys: Sequence[str], *, deadline_s: float, poll_s: float = _POLL_S
) -> set[str]:
    """Which of ``keys`` are there by ``deadline_s`` of `time.perf_counter`.

    Asks again and again rather than waiting in the store: a wait that times out makes
    the store's client write warnings.

    Raises:
        RuntimeError: the store is gone.
    """
    missing = set(keys)
    while True:
        missing = {key for key in missing if not store.check([key])}
        if not missing or perf_counter() >= deadline_s:
            return set(keys) - missing
        sleep(poll_s)
        poll_s = min(2 * poll_s, 0.2)
