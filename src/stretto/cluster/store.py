"""Store a cluster's events in SQLite, with tables of the state that they give.

Called by `stretto.cluster.server` and `stretto.cluster.engine_local`.

`events` is the truth: it is only appended to, except that old reports of steps are
removed (`step_thinning`), which nothing follows from. `jobs`, `attempts` and `devices`
are for readers, such as ``stretto cluster list`` without a coordinator; they are
written in the same transaction, and are what a fold of the events gives.

# Note [Most events are reports of steps]
A restarted coordinator answers only when it has read its store, so it must not look at
each of millions of reports. It reads the other events by an index of their own, each
job's last report from the end of that job's events, and the time from the last events.
"""

from __future__ import annotations

import json
import os
import sqlite3
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import processes, store_release
from stretto.cluster.events import KINDS, STEP
from stretto.cluster.step_thinning import StepThinning
from stretto.cluster.store_release import FORMAT
from stretto.cluster.tables import TABLES, Rows, changed_rows
from stretto.cluster.wire import (
    data_of,
    event_of_row,
    plain_event_of_row,
    row_of_event,
)
from stretto.errors import ClusterError, StoreUnavailable
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stretto.cluster.events import Event
    from stretto.cluster.state import State
    from stretto.schema.job import Job

_log = get_logger(__name__)

DATABASE, LOCK = "cluster.db", "coordinator.lock"

_BUSY_S = 2.0
"""How long to wait for a reader's lock; WAL readers never hold one for long."""

_DAMAGE = (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError)
"""Errors of reading a damaged file."""

_COLUMNS = "seq, at_s, kind, job, attempt, host, data, agent, agent_seq"
_DATA = 5
"""The place of ``data`` in a row, without ``seq``."""

PAGE_ROWS, PAGE_BYTES = 1000, 1 << 19
"""Limits of the events in one answer to a client."""

_EVENTS = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    kind TEXT NOT NULL,
    job TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    host TEXT NOT NULL,
    data TEXT NOT NULL,
    agent TEXT,
    agent_seq INTEGER,
    UNIQUE (agent, agent_seq)
)
"""

_INDEX_BUT_STEPS = (
    "CREATE INDEX IF NOT EXISTS events_but_steps ON events (seq) "
    f"WHERE kind != '{STEP}'"
)
_LAST_EVENTS = 1000
"""Among them is the one of the latest time: their clock never goes back."""


@final
class Store:
    """One writer's connection: WAL, and a lock that only one coordinator has.

    Files have mode 0600 in a folder of mode 0700.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the store of a folder.

        Raises:
            ClusterError: another coordinator has it, a later release has written it,
                or it cannot be opened; the message says which, and the next step.
        """
        self._folder = folder
        store_release.check_unopened(folder / DATABASE)
        self._lock = _locked(folder)
        try:
            self._database = _opened(folder / DATABASE)
            self._is_noted = store_release.is_noted(self._database)
            self._thinning = StepThinning(self._database)
        except BaseException:
            os.close(self._lock)
            raise

    def events(self) -> Iterator[Event]:
        """Yield the kept events in order, without steps.

        Raises:
            ClusterError: the file is damaged.
        """
        for _, event in read_events(self._database, self._folder, steps=False):
            if event.kind not in KINDS:
                release = f"a later release of stretto (events of kind {event.kind!r})"
                raise store_release.is_later(self._folder / DATABASE, release)
            yield event

    def last_steps(self) -> Iterator[Event]:
        """Yield the last report of steps of each job that has one.

        Raises:
            ClusterError: the file is damaged.
        """
        query = (
            f"SELECT {_COLUMNS} FROM events WHERE seq IN (SELECT (SELECT seq FROM "
            f"events WHERE job = jobs.id AND kind = '{STEP}' ORDER BY seq DESC LIMIT 1)"
            " FROM jobs) ORDER BY seq"
        )
        for _, event in _rows_of(self._database, self._folder, query, {}):
            yield event

    @property
    def last_s(self) -> float:
        """Time of the last kept event; 0 without one."""
        last = f"SELECT at_s FROM events ORDER BY seq DESC LIMIT {_LAST_EVENTS}"
        row = self._database.execute(f"SELECT MAX(at_s) FROM ({last})").fetchone()
        return float(row[0] or 0.0)

    def thin_steps(self) -> bool:
        """Remove some old reports of steps; return whether more may be removed."""
        return self._thinning.next_piece()

    def append(self, events: Sequence[Event], state: State) -> None:
        """Keep events, and the rows of jobs, attempts and devices that changed.

        All or nothing; then nothing of ``state`` is dirty. An event whose agent and
        number are kept already is skipped.

        Raises:
            StoreUnavailable: the disk is full, or the file is locked or damaged.
            ClusterError: the lock's file was removed: another coordinator may have the
                store now.
        """
        self.check_lock()
        rows = changed_rows(state, events)
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                if not self._is_noted:
                    store_release.note(self._database)
                self._database.executemany(
                    "INSERT OR IGNORE INTO events VALUES (NULL,?,?,?,?,?,?,?,?)",
                    [row_of_event(event) for event in events],
                )
                _write(self._database, rows)
            self._is_noted = True
            state.dirty.clear()
            for event in events:
                if event.kind == STEP:
                    self._thinning.added(event.job)
        except (sqlite3.Error, OSError) as exc:
            raise StoreUnavailable(
                f"{self._folder / DATABASE}: cannot be written: {exc}. Running jobs "
                "continue; free disk space, or end what locks the file"
            ) from exc

    def check_lock(self) -> None:
        """Require that the locked file is still the one that others would lock.

        Raises:
            ClusterError: it was removed: another coordinator may have the store now.
        """
        path = self._folder / LOCK
        try:
            if os.path.samestat(path.stat(), os.fstat(self._lock)):
                return
        except OSError:
            pass
        raise ClusterError(
            f"{path}: was removed, so another coordinator may have the store"
        )

    def close(self) -> None:
        """Release the lock."""
        self._database.close()
        os.close(self._lock)


def read_only(folder: Path) -> sqlite3.Connection:
    """Return a reader's connection to a store, with or without its coordinator.

    Raises:
        ClusterError: there is no store, or it cannot be read.
    """
    path = folder / DATABASE
    if not path.exists():
        raise ClusterError(
            f"{folder}: has no cluster: start one with `stretto cluster start`"
        )
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_BUSY_S)
        database.execute("SELECT 1 FROM events LIMIT 1")
    except sqlite3.Error as exc:
        raise ClusterError(f"{path}: cannot be read: {exc}") from exc
    return database


def read_events(
    database: sqlite3.Connection,
    folder: Path,
    *,
    since: int = 0,
    job: str | None = None,
    steps: bool = True,
) -> Iterator[tuple[int, Event]]:
    """Yield the kept events after a number, with their numbers.

    Args:
        database: of the store.
        folder: of the store, for messages.
        since: the number.
        job: only its events; ``None``: all.
        steps: also the reports of steps.

    Raises:
        ClusterError: the file is damaged.
    """
    query = _query(job=job, steps=steps)
    yield from _rows_of(database, folder, query, {"since": since, "job": job})


def _query(*, job: str | None, steps: bool = True) -> str:
    return (
        f"SELECT {_COLUMNS} FROM events WHERE seq > :since"
        + ("" if job is None else " AND job = :job")
        + ("" if steps else f" AND kind != '{STEP}'")
        + " ORDER BY seq"
    )


def read_page(
    database: sqlite3.Connection, folder: Path, *, since: int, job: str | None
) -> list[dict[str, Any]]:
    """Return the next kept events after a number as plain JSON, with their numbers.

    At most `PAGE_ROWS`, and none after `PAGE_BYTES`; no event only if none is left.

    Raises:
        ClusterError: the file is damaged.
    """
    found: list[dict[str, Any]] = []
    size = 0
    values = {"since": since, "job": job}
    row: list[Any] = []
    try:
        for seq, *row in database.execute(_query(job=job), values):
            found.append({"seq": seq} | plain_event_of_row(row))
            size += len(row[_DATA])
            if len(found) >= PAGE_ROWS or size >= PAGE_BYTES:
                break
    except _DAMAGE as exc:
        raise _unreadable(folder, exc, row) from exc
    return found


def _rows_of(
    database: sqlite3.Connection, folder: Path, query: str, values: dict[str, Any]
) -> Iterator[tuple[int, Event]]:
    row: list[Any] = []
    try:
        for seq, *row in database.execute(query, values):
            yield seq, event_of_row(row)
    except _DAMAGE as exc:
        raise _unreadable(folder, exc, row) from exc


def _unreadable(folder: Path, exc: Exception, row: Sequence[Any]) -> ClusterError:
    """Return the error for a row that cannot be read."""
    if row and (release := store_release.writer_of(row[_DATA])):
        return store_release.is_later(folder / DATABASE, release)
    return ClusterError(
        f"{folder / DATABASE}: is damaged: {exc}. Move it away and start again; jobs "
        "that run now end when their watchdog fires"
    )


def read_table(database: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    """Return the rows of ``jobs``, ``attempts`` or ``devices``, by their keys."""
    columns = TABLES[table]
    keys = ", ".join(columns[: _KEYS[table]])
    names = ", ".join(columns)
    # The names are those of `TABLES`, never a user's.
    query = f"SELECT {names} FROM {table} ORDER BY {keys}"
    return [
        {
            name: json.loads(value) if name in _JSON and value else value
            for name, value in zip(columns, row, strict=True)
        }
        for row in database.execute(query)
    ]


def read_spec(database: sqlite3.Connection, job: str) -> Job | None:
    """Return a job as it was submitted, or ``None`` if there is no such job."""
    row = database.execute(
        "SELECT data FROM events WHERE kind = 'submitted' AND job = ?", (job,)
    ).fetchone()
    if row is None:
        return None
    spec: Job = data_of(json.loads(row[0]))["spec"]
    return spec


_KEYS = {"jobs": 1, "attempts": 3, "devices": 2}
_JSON = ("devices",)


def _locked(folder: Path) -> int:
    """Return the descriptor that holds the folder's lock.

    The kernel releases it when the process ends, however it ends.

    Raises:
        ClusterError: another coordinator has it, or it cannot be created.
    """
    path = folder / LOCK
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # With patience: who looks whether a coordinator runs has it for a moment.
        lock = processes.lock(path)
        text = path.read_text(errors="replace").strip() if lock is None else ""
    except OSError as exc:
        raise ClusterError(f"{folder}: cannot be opened: {exc.strerror}") from exc
    if lock is None:
        raise ClusterError(
            f"{folder}: another coordinator has it (process {text or 'unknown'}): use "
            "that one, or end it with `stretto cluster down`"
        )
    processes.note_owner(lock)
    return lock


def _opened(path: Path) -> sqlite3.Connection:
    """Return the writer's connection.

    Raises:
        ClusterError: a later release has written the file, or it cannot be opened.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        store_release.check(database, path)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(_EVENTS)
        database.execute("CREATE INDEX IF NOT EXISTS events_of_job ON events (job)")
        for name, columns in TABLES.items():
            keys = ", ".join(columns[: _KEYS[name]])
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {name} "
                f"({', '.join(columns)}, PRIMARY KEY ({keys}))"
            )
        found = database.execute("SELECT name FROM pragma_table_info('attempts')")
        if ("way",) in found.fetchall():  # its name in earlier stores
            database.execute("ALTER TABLE attempts RENAME COLUMN way TO method")
        if version != FORMAT:  # a full disk would refuse to write it again
            database.execute(f"PRAGMA user_version = {FORMAT}")
    except (sqlite3.Error, OSError) as exc:
        raise ClusterError(f"{path}: cannot be opened: {exc}") from exc
    try:
        database.execute(_INDEX_BUT_STEPS)  # which earlier stores do not have
    except sqlite3.Error as exc:
        _log.warning("%s: has no index, so it is read slowly: %s", path, exc)
    return database


def _write(database: sqlite3.Connection, rows: Rows) -> None:
    for table, some in rows.items():
        marks = ",".join("?" * len(TABLES[table]))
        database.executemany(
            f"INSERT OR REPLACE INTO {table} VALUES ({marks})",
            some,
        )
