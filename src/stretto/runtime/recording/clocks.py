"""Compare the clocks of ranks through the store.

# Note [Clocks of several hosts]
`time.perf_counter` counts from the start of a host, so two hosts' values are unrelated.
A rank asks the reference rank for its time and gets an answer. The reference's clock
was read between the question and the answer, which bounds the offset from both sides.
The tightest bounds of many questions are kept.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from stretto.process_identity import boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store

DRIFT_RATIO = 200e-6
"""Maximum drift between two hosts' clocks, per second.

Crystals are within 50 in a million, and correction over the network (NTP) slews by
about 100 more in quiet operation.
"""

_GOOD_BOUND_S = 100e-6
_MAX_REQUESTS = 64
_MAX_S = 2.0
_ANSWER_S = 1.0
_END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRequest:
    """One request for the reference's time, all in seconds."""

    sent_s: float
    """Send time on the requesting rank's clock."""

    reference_s: float
    """Time on the reference's clock, between the other two."""

    answered_s: float
    """Receive time on the requesting rank's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPoint:
    """Offset of the reference's clock from a rank's at one time."""

    at_s: float
    """Time on the rank's clock."""

    offset_s: float
    """Reference minus rank."""

    bound_s: float
    """The offset is known within plus or minus this."""


def point_of(requests: Sequence[TimeRequest]) -> ClockPoint:
    """Return the offset that is consistent with all requests.

    Each request shows that the offset is at least ``reference - answered`` and at most
    ``reference - asked``. Without drift all of these hold, so the offset is in the
    intersection; its middle is the estimate and half its width is the bound. (This is
    Cristian's method, Distributed Computing 3, 1989, with the intersection of Marzullo
    and Owicki, 1983.) If clocks have drifted so much that the intersection is empty,
    the fastest request alone is used.
    """
    low_s = max(a.reference_s - a.answered_s for a in requests)
    high_s = min(a.reference_s - a.sent_s for a in requests)
    if low_s > high_s:
        quickest = min(requests, key=lambda a: a.answered_s - a.sent_s)
        low_s = quickest.reference_s - quickest.answered_s
        high_s = quickest.reference_s - quickest.sent_s
    return ClockPoint(
        at_s=requests[-1].answered_s,
        offset_s=(low_s + high_s) / 2,
        bound_s=(high_s - low_s) / 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """Maps a rank's clock to the reference's, from the points of comparison.

    Between two points the offset is interpolated linearly, which follows a steady
    drift. Beyond them it is constant, and the bound grows with `DRIFT_RATIO`. Without
    points both clocks are the same.
    """

    points: tuple[ClockPoint, ...] = ()

    def offset_s(self, at_s: float) -> float:
        """Return the offset to add to the rank's time ``at_s`` for the reference's."""
        if not self.points:
            return 0.0
        for before, after in itertools.pairwise(self.points):
            if before.at_s <= at_s <= after.at_s and before.at_s < after.at_s:
                share = (at_s - before.at_s) / (after.at_s - before.at_s)
                return before.offset_s + share * (after.offset_s - before.offset_s)
        return self._nearest(at_s).offset_s

    def bound_s(self, at_s: float) -> float:
        """Return the error bound of `offset_s` at ``at_s``.

        Between two points it is the larger of their bounds, if the drift is steady.
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
    """Return the name of this process's clock; equal names mean the same clock.

    On Linux all processes of a host share it, unless a time namespace shifts it.
    """
    try:
        return f"{boot_id()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return str(uuid.uuid4())


def ask_reference(store: Store, place: str) -> ClockPoint | None:
    """Compare this rank's clock with the reference's, through the store.

    ``store`` is this thread's own connection. Return ``None`` if there was no answer in
    time.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    requests: list[TimeRequest] = []
    began_s = perf_counter()
    try:
        while len(requests) < _MAX_REQUESTS and perf_counter() - began_s < _MAX_S:
            number = len(requests)
            sent_s = perf_counter()
            store.set(f"{place}/ask/{number}", "")
            answer = store.get(f"{place}/answer/{number}")
            answered_s = perf_counter()
            reference_s = float(answer)
            requests.append(
                TimeRequest(
                    sent_s=sent_s, reference_s=reference_s, answered_s=answered_s
                )
            )
            if number and point_of(requests).bound_s < _GOOD_BOUND_S:
                break
        store.set(f"{place}/ask/{len(requests)}", _END)
        for number in range(len(requests)):
            store.delete_key(f"{place}/answer/{number}")
    except RuntimeError:  # the reference, or its store, is lost or busy
        pass
    return point_of(requests) if requests else None


def answer_rank(store: Store, place: str) -> None:
    """Answer one rank's requests for the time until it sends the last.

    ``store`` is this thread's own connection.

    Raises:
        RuntimeError: the rank stopped asking, or the store is lost.
    """
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    for number in range(_MAX_REQUESTS + 1):
        question = store.get(f"{place}/ask/{number}")
        if question.decode() == _END:
            store.delete_key(f"{place}/ask/{number}")
            return
        store.set(f"{place}/answer/{number}", repr(perf_counter()))
        store.delete_key(f"{place}/ask/{number}")
