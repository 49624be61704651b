"""When the next round may begin."""

from __future__ import annotations

from typing import final

_LONGEST_S = 0.02
_SHARE = 0.25


@final
class Pace:
    """Keeps rounds from following each other when they bring nothing.

    # Note [Rounds that bring nothing]
    A rank that waits for a peer mostly sleeps in the all-reduce of a round that the
    peer has not entered. But when ranks wait for different requests, each enters, the
    round ends at once and nothing is ready; the next would be no better. So after a
    round without a launch the next waits for a quarter of the time since the last one
    that brought something, at most 20 ms, and at least ``cycle_s``. Something new on a
    rank begins its next round after ``cycle_s``; the others come within their pause. A
    wait of 1 s then takes some 60 rounds of 0.1 to 0.2 ms: about 1 % of a core; and
    what becomes ready after a wait of w is seen at most w / 4 and 20 ms late. The first
    round after an idle time begins at once.
    """

    def __init__(self, cycle_s: float) -> None:
        self._cycle_s = cycle_s
        self._began_s = float("-inf")
        self._progress_s = float("-inf")
        self._barren = False

    def begin(self, now_s: float) -> None:
        """A round begins."""
        self._began_s = now_s

    def end(self, now_s: float, *, launched: bool) -> None:
        """A round ended, with or without anything ready."""
        if launched or not self._barren:
            self._progress_s = now_s
        self._barren = not launched

    def due_s(self, *, news: bool) -> float:
        """Earliest time for the next round, given whether anything is new here."""
        due_s = self._began_s + self._cycle_s
        if news or not self._barren:
            return due_s
        waited_s = self._began_s - self._progress_s
        return max(due_s, self._began_s + min(_LONGEST_S, _SHARE * waited_s))
