"""Plans kept between runs, in a small SQLite file on rank 0's host.

An entry is a settled plan, or the best one of a run that ended before tuning had
settled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError
from stretto.schema import Cluster, Plan, Workload, codec
from stretto.tune.likeness import Topology, chain_of, job_distance

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

VERSION = 1
"""Of the file's layout; another one is left alone."""

VARIABLE = "STRETTO_MEMORY"
"""The file's path, or ``off``."""

KEPT = 500
"""Entries beyond this go, oldest first."""

_LOCK_S = 2.0

_ADDED = "unfinished_steps"
"""A column that older files of this layout lack. They get it when it is first needed;
an older stretto goes on reading and writing the others."""

_EQUAL = "WHERE model = ? AND hosts = ? AND ranks_per_host = ? AND surroundings = ?"

_LAYOUT = """
CREATE TABLE IF NOT EXISTS settled (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    hosts INTEGER NOT NULL,
    ranks_per_host INTEGER NOT NULL,
    surroundings TEXT NOT NULL,
    step_s REAL NOT NULL,
    ddp_step_s REAL,
    workload TEXT NOT NULL,
    cluster TEXT NOT NULL,
    plan TEXT NOT NULL,
    unfinished_steps INTEGER,
    UNIQUE (model, hosts, ranks_per_host, surroundings)
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a plan was settled for: equal jobs may share it."""

    name: str
    """For people; not compared."""

    model: str
    """Digest of the tensors' names, sizes and types."""

    hosts: int

    ranks_per_host: int

    surroundings: str
    """Versions, backend and device that a plan's worth depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A settled plan, or an unfinished search's best, and what was measured with it."""

    job: Job

    plan: Plan

    workload: Workload

    cluster: Cluster

    step_s: float

    ddp_step_s: float | None = None

    number: int | None = None
    """In the file; ``None``: not in it yet."""

    at: str = ""
    """When it was kept, UTC."""

    unfinished_steps: int | None = None
    """Steps of the runs that ended before tuning had settled; ``None``: it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An entry of which only the number and the name can be told."""

    number: int

    name: str

    at: str

    why: str


def default_path() -> Path | None:
    """Where plans are kept; ``None``: nowhere, as the environment asks."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named in ("", "off") else Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stretto" / "plans.sqlite"


@final
class PlanMemory:
    """The plans of one file. Several jobs may use it at once.

    With ``strict`` false, as in a training run, whatever is wrong with the file costs
    one warning and the memory: everything else goes on. With ``strict`` true it raises.
    An entry that can't be read is passed over, with one warning for all of them.
    """

    def __init__(self, path: Path | None, *, strict: bool = False) -> None:
        """The memory in a file, made where there is none yet."""
        self._path = path
        self._strict = strict
        self._unreadable: set[int] = set()

    def exact(self, job: Job) -> Remembered | None:
        """The plan kept for an equal job.

        Raises:
            SpecError: the file can't be used, where ``strict``.
        """
        rows = self._readable(self._rows(_EQUAL, _key(job)))
        return rows[0] if rows else None

    def nearest(
        self, workload: Workload, topology: Topology, surroundings: str
    ) -> tuple[Remembered, float] | None:
        """The plan of the most similar job in equal surroundings, and its distance.

        Raises:
            SpecError: the file can't be used, where ``strict``.
        """
        chain = chain_of(workload)
        best: tuple[Remembered, float] | None = None
        rows = self._rows("WHERE surroundings = ?", (surroundings,))
        for found in self._readable(rows):
            distance = job_distance(
                (chain, chain_of(found.workload)),
                (topology, topology_of(found.cluster)),
            )
            if best is None or distance < best[1]:
                best = found, distance
        return best

    def all(self) -> list[Remembered | Unreadable]:
        """Everything, newest first.

        Raises:
            SpecError: the file can't be used, where ``strict``.
        """
        return self._rows("", ())

    def remember(self, entry: Remembered, *, refuted: int | None = None) -> bool:
        """Keeps a plan, in place of an earlier one for an equal job; whether it did.

        An unfinished one never takes the place of a settled one, unless that is
        number ``refuted``, whose steps were found to take longer now.

        Raises:
            SpecError: the file can't be used, where ``strict``.
        """
        kept = False
        with self._guard("keep a plan"), self._open() as file:
            if file is not None:
                may_go = {refuted, *self._unreadable}
                kept = _keep(file, entry, may_go)
        return kept

    def forget(self, number: int | None = None) -> int:
        """Drops one entry, or all; how many there were.

        Raises:
            SpecError: the file can't be used, where ``strict``.
        """
        dropped = 0
        with self._guard("forget plans"), self._open() as file:
            if file is not None and number is None:
                dropped = file.execute("DELETE FROM settled").rowcount
            elif file is not None:
                found = file.execute("DELETE FROM settled WHERE id = ?", (number,))
                dropped = found.rowcount
        return dropped

    def _rows(
        self, where: str, values: tuple[object, ...]
    ) -> list[Remembered | Unreadable]:
        found: list[Remembered | Unreadable] = []
        with self._guard("look plans up"), self._open() as file:
            if file is not None:
                added = _ADDED if _has_added(file) else "NULL"
                rows = file.execute(
                    "SELECT id, at, name, model, hosts, ranks_per_host, surroundings, "
                    f"step_s, ddp_step_s, workload, cluster, plan, {added} "
                    f"FROM settled {where} ORDER BY id DESC",
                    values,
                ).fetchall()
                found = [_entry(row) for row in rows]
        return found

    def _readable(self, rows: list[Remembered | Unreadable]) -> list[Remembered]:
        broken = [row for row in rows if isinstance(row, Unreadable)]
        if broken and not self._unreadable:
            _log.warning(
                "%s: entry %d can't be read: %s. `stretto tune list` names such "
                "entries, `stretto tune forget %d` drops this one",
                self._path,
                broken[0].number,
                broken[0].why,
                broken[0].number,
            )
        self._unreadable.update(row.number for row in broken)
        return [row for row in rows if isinstance(row, Remembered)]

    @contextlib.contextmanager
    def _guard(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, SpecError) as exc:
            what = (
                f"{self._path}: can't {purpose}: {exc}. Remove the file, or set "
                f"{VARIABLE} to another path or to off"
            )
            if self._strict:
                raise SpecError(what) from exc
            _log.warning("%s. Going on without remembered plans", what)
            self._path = None  # one warning is enough

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """A connection for one transaction; none where nothing is kept."""
        if self._path is None:
            yield None
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=_LOCK_S)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise SpecError(
                    f"its layout is version {version}, this stretto reads {VERSION}"
                )
            with connection:
                if version == 0:
                    _lay_out(connection)
                yield connection
        finally:
            connection.close()


def _lay_out(connection: sqlite3.Connection) -> None:
    """Makes the table in a new file.

    Raises:
        SpecError: the file is somebody else's.
    """
    connection.execute("BEGIN IMMEDIATE")  # table and version for others at one time
    if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
        return  # another job was first
    row = connection.execute("SELECT name FROM sqlite_master").fetchone()
    if row is not None:
        raise SpecError(f"it is a database of something else: it holds {row[0]!r}")
    connection.execute(_LAYOUT)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def topology_of(cluster: Cluster) -> Topology:
    """Ranks and rates of a measured cluster."""
    return Topology(
        hosts=cluster.hosts,
        ranks_per_host=cluster.ranks_per_host,
        inter_bytes_per_s=cluster.inter_host.bandwidth_bytes_per_s,
        intra_bytes_per_s=cluster.intra_host.bandwidth_bytes_per_s,
    )


def _keep(file: sqlite3.Connection, entry: Remembered, may_go: set[int | None]) -> bool:
    """Puts an entry in; whether it may stand where an equal job's settled one stands.

    ``may_go`` are the numbers of settled ones for which an unfinished one is better.
    """
    job = entry.job
    row: dict[str, object] = {
        "name": job.name,
        "model": job.model,
        "hosts": job.hosts,
        "ranks_per_host": job.ranks_per_host,
        "surroundings": job.surroundings,
        "step_s": entry.step_s,
        "ddp_step_s": entry.ddp_step_s,
        "workload": codec.encode(entry.workload),
        "cluster": codec.encode(entry.cluster),
        "plan": codec.encode(entry.plan),
    }
    if not file.in_transaction:
        file.execute("BEGIN IMMEDIATE")  # what is read below is there still
    if entry.unfinished_steps is not None:
        if not _has_added(file):
            file.execute(f"ALTER TABLE settled ADD COLUMN {_ADDED} INTEGER")
        row[_ADDED] = entry.unfinished_steps
        stands = file.execute(
            f"SELECT id FROM settled {_EQUAL} AND {_ADDED} IS NULL", _key(job)
        ).fetchone()
        if stands is not None and stands[0] not in may_go:
            return False
    file.execute(
        f"INSERT OR REPLACE INTO settled ({', '.join(row)}) "
        f"VALUES ({', '.join('?' * len(row))})",
        tuple(row.values()),
    )
    file.execute(
        "DELETE FROM settled WHERE id NOT IN "
        "(SELECT id FROM settled ORDER BY id DESC LIMIT ?)",
        (KEPT,),
    )
    return True


def _key(job: Job) -> tuple[object, ...]:
    return job.model, job.hosts, job.ranks_per_host, job.surroundings


def _has_added(file: sqlite3.Connection) -> bool:
    columns = file.execute("PRAGMA table_info(settled)").fetchall()
    return any(column[1] == _ADDED for column in columns)


def _entry(row: tuple[object, ...]) -> Remembered | Unreadable:
    try:
        return _remembered(row)
    except (SpecError, ValueError) as exc:
        return Unreadable(
            number=int(str(row[0])), name=str(row[2]), at=str(row[1]), why=str(exc)
        )


def _remembered(row: tuple[object, ...]) -> Remembered:
    number, at, name, model, hosts, per_host, around, step_s, ddp_s, *rest = row
    w, c, p, steps = rest
    return Remembered(
        job=Job(
            name=str(name),
            model=str(model),
            hosts=int(str(hosts)),
            ranks_per_host=int(str(per_host)),
            surroundings=str(around),
        ),
        plan=codec.decode(_text(p), Plan),
        workload=codec.decode(_text(w), Workload),
        cluster=codec.decode(_text(c), Cluster),
        step_s=float(str(step_s)),
        ddp_step_s=None if ddp_s is None else float(str(ddp_s)),
        number=int(str(number)),
        at=str(at),
        unfinished_steps=None if steps is None else int(str(steps)),
    )


def _text(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
