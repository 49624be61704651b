"""Which releases have written a store, and the refusal of one by a later release.

A later release may keep what this one does not know. To read on would lose it, and to
write would mix two formats, so such a store is not opened for writing at all.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from typing import TYPE_CHECKING

from stretto.errors import ClusterError
from stretto.schema import codec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = 1
"""``user_version`` of the database."""

_BUSY_S = 2.0
_RELEASE = re.compile(r"stretto (\d+)\.(\d+)(?:\.(\d+))?")


def check_unopened(path: Path) -> None:
    """Require that no later release has written a store, without changing its files.

    A file that cannot be read is not judged: who opens it says why.

    Raises:
        ClusterError: a later release has.
    """
    if not path.exists():
        return
    with contextlib.suppress(sqlite3.Error):
        uri = f"{path.absolute().as_uri()}?mode=ro"
        database = sqlite3.connect(uri, uri=True, timeout=_BUSY_S)
        with contextlib.closing(database):
            check(database, path)


def check(database: sqlite3.Connection, path: Path) -> None:
    """Require that no later release has written an open store.

    Raises:
        ClusterError: a later release has.
    """
    found = database.execute("PRAGMA user_version").fetchone()[0]
    latest = max(_releases(database), key=_number, default="")
    if found not in (0, FORMAT):
        writer = latest if _is_later(latest) else "a later release of stretto"
        raise is_later(path, f"{writer} (format {found}, this one has {FORMAT})")
    if _is_later(latest):
        raise is_later(path, latest)


def is_later(path: Path, release: str) -> ClusterError:
    """Return the error for a store that a later release has written."""
    return ClusterError(
        f"{path}: was written by {release}, this is {codec.MADE_BY}: upgrade stretto, "
        "or choose another folder with --folder. Nothing was changed; jobs that run "
        "now end when their watchdog fires"
    )


def writer_of(data: object) -> str:
    """Return who wrote a row's data, if that is a later release than this."""
    try:
        spec = json.loads(str(data)).get("spec", {})
        made_by, version = str(spec.get("made_by", "")), spec.get("schema_version", 1)
    except (ValueError, AttributeError):
        return ""
    if _is_later(made_by):
        return made_by
    is_newer = isinstance(version, int) and version > codec.SCHEMA_VERSION
    return f"a later release of stretto (job files of version {version})" * is_newer


def is_noted(database: sqlite3.Connection) -> bool:
    """Return whether the store names this release among those that wrote it."""
    return codec.MADE_BY in _noted(database)


def note(database: sqlite3.Connection) -> None:
    """Name this release among those that wrote the store."""
    database.execute("CREATE TABLE IF NOT EXISTS releases (release PRIMARY KEY)")
    database.execute("INSERT OR IGNORE INTO releases VALUES (?)", (codec.MADE_BY,))


def _noted(database: sqlite3.Connection) -> list[str]:
    try:
        rows = database.execute("SELECT release FROM releases").fetchall()
    except sqlite3.OperationalError:  # of a release that did not note it
        return []
    return [str(row[0]) for row in rows]


def _releases(database: sqlite3.Connection) -> Iterator[str]:
    yield from _noted(database)
    with contextlib.suppress(sqlite3.OperationalError):
        row = database.execute(
            "SELECT data FROM events WHERE kind = 'submitted' ORDER BY seq DESC LIMIT 1"
        ).fetchone()
        if row is not None and (writer := writer_of(row[0])):
            yield writer


def _number(release: str) -> tuple[int, ...]:
    found = _RELEASE.match(release)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def _is_later(release: str) -> bool:
    return _number(release) > _number(codec.MADE_BY)
