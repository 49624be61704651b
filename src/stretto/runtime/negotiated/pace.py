"""Decide when the next round may begin."""

from __future__ import annotations

from typing import final

_LONGEST_S = 0.02
_SHARE = 0.25


@final
class Pace:
    """Spaces out rounds that make no progress.

    # Note [Rounds that bring nothing]
    A rank that waits for a peer mostly sleeps in the all-reduce of a round that the
    peer has not entered. But if ranks wait for different requests, each enters, the
    round ends at once without a ready request, and the next round would be no better.
    So after a round without a launch, the next round waits for a quarter of the time
    since the last round with progress, at most 20 ms and at least ``cycle_s``. New work
    on a rank begins its next round after ``cycle_s``; the others enter within their
    pause. A wait of 1 s then takes about 60 rounds of 0.1 to 0.2 ms, about 1 % of a
    core; and a request that becomes ready after a wait of w is seen at most w / 4 and
    20 ms late. The first round after an idle time begins at once.
    """

    def __init__(self, cycle_s: float) -> None:
        self._cycle_s = cycle_s
        self._began_s = float("-inf")
        self._progress_s = float("-inf")
        self._barren = False

    def begin(self, now_s: float) -> None:
        """Record that a round begins."""
        self._began_s = now_s

    def end(self, now_s: float, *, launched: bool) -> None:
        """Record that a round ended, with or without a launch."""
        if launched or not self._barren:
            self._progress_s = now_s
        self._barren = not launched

    def due_s(self, *, news: bool) -> float:
        """Return the earliest time for the next round; ``news``: there is new work."""
        due_s = self._began_s + self._cycle_s
        if news or not self._barren:
            return due_s
        waited_s = self._began_s - self._progress_s
        return max(due_s, self._began_s + min(_LONGEST_S, _SHARE * waited_s))
