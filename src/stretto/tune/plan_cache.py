"""Store plans between runs in a small SQLite file on rank 0's host.

An entry is a settled plan, or the best one of a run that ended before tuning had
settled.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto import variable_names
from stretto.errors import SpecError
from stretto.logs import get_logger
from stretto.schema import Cluster, Plan, Workload, codec
from stretto.tune.job_similarity import RateTopology, chain_of, job_distance

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = get_logger(__name__)

VERSION = 1
"""Version of the file's layout; a file with another version is not touched."""


KEPT = 500
"""Maximum number of entries; the oldest beyond it are deleted."""

_LOCK_S = 2.0

_ADDED = "unfinished_steps"
"""A column that older files of this layout lack. It is added when it is first needed;
an older stretto continues to read and write the other columns."""

# The column of a job's environment keeps the name that older files have.
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
class TunedJob:
    """The job that a plan was settled for: equal jobs may share it."""

    name: str
    """For display only; not compared."""

    model: str
    """Digest of the tensors' names, sizes and types."""

    hosts: int

    ranks_per_host: int

    environment: str
    """Versions, backend and device, on which a plan's value depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """A settled plan, or an unfinished search's best, with its measurements."""

    job: TunedJob

    plan: Plan

    workload: Workload

    cluster: Cluster

    step_s: float

    ddp_step_s: float | None = None

    number: int | None = None
    """Its number in the file, or ``None`` if it is not stored yet."""

    at: str = ""
    """Time of storage, UTC."""

    unfinished_steps: int | None = None
    """Steps of runs that ended before tuning settled; ``None`` if it had settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An entry of which only the number and the name can be read."""

    number: int

    name: str

    at: str

    why: str


def default_path() -> Path | None:
    """Return the file for plans; ``None`` if it is disabled or has no folder."""
    named = os.environ.get(
        variable_names.PLAN_CACHE, os.environ.get(variable_names.FORMER_PLAN_CACHE)
    )
    if named is not None:
        return None if named in ("", "off") else Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a container's user without an entry and without HOME
            _log.warning(
                "there is no home directory, so settled plans are not kept for the "
                "next run: set HOME, or name a file in %s",
                variable_names.PLAN_CACHE,
            )
            return None
    return Path(base) / "stretto" / "plans.sqlite"


@final
class PlanCache:
    """The plans of one file. Several jobs may use it at once.

    With ``strict`` false, as in a training run, an error with the file costs one
    warning and disables the cache; everything else continues. With ``strict`` true it
    raises. An unreadable entry is skipped, with one warning for all such entries.
    """

    def __init__(self, path: Path | None, *, strict: bool = False) -> None:
        """Use the file at ``path``; it is created when it is first needed."""
        self._path = path
        self._strict = strict
        self._unreadable: set[int] = set()

    def exact(self, job: TunedJob) -> CachedPlan | None:
        """Return the plan stored for an equal job.

        Raises:
            SpecError: the file can't be used and ``strict`` is true.
        """
        rows = self._readable(self._rows(_EQUAL, _key(job)))
        return rows[0] if rows else None

    def nearest(
        self, workload: Workload, topology: RateTopology, environment: str
    ) -> tuple[CachedPlan, float] | None:
        """Return the most similar job's plan in an equal environment, and its distance.

        Raises:
            SpecError: the file can't be used and ``strict`` is true.
        """
        chain = chain_of(workload)
        best: tuple[CachedPlan, float] | None = None
        rows = self._rows("WHERE surroundings = ?", (environment,))
        for found in self._readable(rows):
            distance = job_distance(
                (chain, chain_of(found.workload)),
                (topology, topology_of(found.cluster)),
            )
            if best is None or distance < best[1]:
                best = found, distance
        return best

    def all(self) -> list[CachedPlan | Unreadable]:
        """Return all entries, newest first.

        Raises:
            SpecError: the file can't be used and ``strict`` is true.
        """
        return self._rows("", ())

    def store(self, entry: CachedPlan, *, refuted: int | None = None) -> bool:
        """Store a plan, replacing that of an equal job; return whether it was stored.

        An unfinished plan never replaces a settled one, unless that is number
        ``refuted``, whose steps were found to take longer now.

        Raises:
            SpecError: the file can't be used and ``strict`` is true.
        """
        stored = False
        with self._guard("keep a plan"), self._open() as file:
            if file is not None:
                may_go = {refuted, *self._unreadable}
                stored = _store(file, entry, may_go)
        return stored

    def delete(self, number: int | None = None) -> int:
        """Delete one entry, or all; return the number of deleted entries.

        Raises:
            SpecError: the file can't be used and ``strict`` is true.
        """
        dropped = 0
        with self._guard("forget plans"), self._open() as file:
            if file is not None and number is None:
                dropped = file.execute("DELETE FROM settled").rowcount
            elif file is not None:
                found = file.execute("DELETE FROM settled WHERE id = ?", (number,))
                dropped = found.rowcount
        return dropped

    remember, forget = store, delete
    """`store` and `delete`, under their former names."""

    def _rows(
        self, where: str, values: tuple[object, ...]
    ) -> list[CachedPlan | Unreadable]:
        found: list[CachedPlan | Unreadable] = []
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

    def _readable(self, rows: list[CachedPlan | Unreadable]) -> list[CachedPlan]:
        broken = [row for row in rows if isinstance(row, Unreadable)]
        if broken and not self._unreadable:
            _log.warning(
                "%s: entry %d can't be read: %s. `stretto tune list` names such "
                "entries, `stretto tune forget %d` deletes this one",
                self._path,
                broken[0].number,
                broken[0].why,
                broken[0].number,
            )
        self._unreadable.update(row.number for row in broken)
        return [row for row in rows if isinstance(row, CachedPlan)]

    @contextlib.contextmanager
    def _guard(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, SpecError) as exc:
            has_file = self._path is not None and self._path.is_file()
            remedy = "Remove the file, or set" if has_file else "Set"
            what = (
                f"{self._path}: can't {purpose}: {exc}. {remedy} "
                f"{variable_names.PLAN_CACHE} to another path or to off"
            )
            if self._strict:
                raise SpecError(what) from exc
            _log.warning("%s. Continuing without cached plans", what)
            self._path = None  # one warning is enough

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection for one transaction, or None if the cache is off."""
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


PlanMemory = PlanCache
"""`PlanCache`, under its former name."""


def _lay_out(connection: sqlite3.Connection) -> None:
    """Create the table in a new file.

    Raises:
        SpecError: the file belongs to another program.
    """
    connection.execute("BEGIN IMMEDIATE")  # publish table and version together
    if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
        return  # another job was first
    row = connection.execute("SELECT name FROM sqlite_master").fetchone()
    if row is not None:
        raise SpecError(f"it belongs to another program: it holds the table {row[0]!r}")
    connection.execute(_LAYOUT)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def topology_of(cluster: Cluster) -> RateTopology:
    """Return ranks and rates of a measured cluster."""
    return RateTopology(
        hosts=cluster.hosts,
        ranks_per_host=cluster.ranks_per_host,
        inter_bytes_per_s=cluster.inter_host.bandwidth_bytes_per_s,
        intra_bytes_per_s=cluster.intra_host.bandwidth_bytes_per_s,
    )


def _store(
    file: sqlite3.Connection, entry: CachedPlan, may_go: set[int | None]
) -> bool:
    """Store an entry unless an equal job's settled entry takes precedence.

    ``may_go`` are the numbers of settled entries that an unfinished one may replace.

    Returns:
        Whether the entry was stored.
    """
    job = entry.job
    row: dict[str, object] = {
        "name": job.name,
        "model": job.model,
        "hosts": job.hosts,
        "ranks_per_host": job.ranks_per_host,
        "surroundings": job.environment,
        "step_s": entry.step_s,
        "ddp_step_s": entry.ddp_step_s,
        "workload": codec.encode(entry.workload),
        "cluster": codec.encode(entry.cluster),
        "plan": codec.encode(entry.plan),
    }
    if not file.in_transaction:
        file.execute("BEGIN IMMEDIATE")  # what is read below stays valid
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


def _key(job: TunedJob) -> tuple[object, ...]:
    return job.model, job.hosts, job.ranks_per_host, job.environment


def _has_added(file: sqlite3.Connection) -> bool:
    columns = file.execute("PRAGMA table_info(settled)").fetchall()
    return any(column[1] == _ADDED for column in columns)


def _entry(row: tuple[object, ...]) -> CachedPlan | Unreadable:
    try:
        return _cached(row)
    except (SpecError, ValueError) as exc:
        return Unreadable(
            number=int(str(row[0])), name=str(row[2]), at=str(row[1]), why=str(exc)
        )


def _cached(row: tuple[object, ...]) -> CachedPlan:
    number, at, name, model, hosts, per_host, around, step_s, ddp_s, *rest = row
    w, c, p, steps = rest
    return CachedPlan(
        job=TunedJob(
            name=str(name),
            model=str(model),
            hosts=int(str(hosts)),
            ranks_per_host=int(str(per_host)),
            environment=str(around),
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
