"""Fewer reports of steps, for `store`: jobs that run for months would fill a disk."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter, deque
from typing import final

from stretto.cluster.events import STEP

KEPT_STEPS = 1000
"""The last reports of a job that stay; at one every 10 s, those of almost 3 hours."""

_PERIOD_S = 3600.0
"""Period of which the first of each attempt's earlier reports stays."""

_PIECE = 1000
"""Reports that one call looks at: some milliseconds."""

_AGAIN = 200
"""New reports of a job until it is looked at again."""

_ALL_JOBS = "SELECT id FROM jobs"


@final
class StepThinning:
    """Removes reports of steps piece by piece, beginning with what is there already."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._new: Counter[str] = Counter()
        self._jobs: deque[str] = deque()
        with contextlib.suppress(sqlite3.Error):  # who reads the events says so
            self._jobs.extend(row[0] for row in database.execute(_ALL_JOBS))
        self._places: dict[str, tuple[int, tuple[int, int] | None]] = {}
        """By job: the last report that was looked at, and of which time one stays."""

    def added(self, job: str) -> None:
        """Count a new report."""
        self._new[job] += 1
        if self._new[job] >= _AGAIN:
            del self._new[job]
            self._jobs.append(job)

    def next_piece(self) -> bool:
        """Remove what is too much of a piece; return whether there is more to look at.

        What cannot be written is tried again in a later call.
        """
        if not self._jobs:
            return False
        try:
            is_over = self._thin(self._jobs[0])
        except sqlite3.Error:  # a full disk: the line about events says so
            return True
        if is_over:
            self._jobs.popleft()
        return bool(self._jobs)

    def _thin(self, job: str) -> bool:
        """Remove what is too much of a job's next piece; return whether it is over."""
        after, stays = self._places.get(job, (0, None))
        reports = f"FROM events WHERE job = ? AND kind = '{STEP}'"
        first_kept = self._database.execute(
            f"SELECT seq {reports} ORDER BY seq DESC LIMIT 1 OFFSET {KEPT_STEPS - 1}",
            (job,),
        ).fetchone()
        if first_kept is None:
            return True
        rows = self._database.execute(
            f"SELECT seq, attempt, at_s {reports} AND seq > ? AND seq < ? "
            f"ORDER BY seq LIMIT {_PIECE}",
            (job, after, first_kept[0]),
        ).fetchall()
        removed = []
        for seq, attempt, at_s in rows:
            time = attempt, int(at_s // _PERIOD_S)
            if time == stays:
                removed.append((seq,))
            after, stays = seq, time
        if removed:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("DELETE FROM events WHERE seq = ?", removed)
        self._places[job] = after, stays
        return len(rows) < _PIECE
