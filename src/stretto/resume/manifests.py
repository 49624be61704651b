"""Which snapshots in a folder are complete, and which is the newest.

# Note [Order of snapshots]
A snapshot consists of a file with the state and a manifest, which is written last. Both
are written under another name, flushed to the disk and renamed, so a manifest that is
there names a complete file. Its size and digest are compared when it is read.

Snapshots are ordered by run, generation and step. Each start of a job counts as a run,
one higher than that of the newest manifest; a generation is a membership within a run.
So a rank that was cut off and still writes cannot hide what the others wrote since. Old
snapshots are removed only after a newer one is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.errors import SpecError, StrettoError
from stretto.schema.codec import replacing
from stretto.units import parse_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import IO

VERSION = 1

_SUFFIX = ".snapshot.json"
_NAME = re.compile(r"^\.?run([0-9]+)-membership([0-9]+)-step([0-9]+)\.")

_PLAIN_NAME = re.compile(r"^[\w-][\w.-]*\Z")
"""A file in the same folder."""

_STEPS = re.compile(r"^\s*([0-9]+)\s*steps?\s*$")


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to take a snapshot: after a number of steps, or of seconds."""

    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, text: str) -> Interval:
        """Return the interval that ``"100 steps"`` or ``"10 min"`` names.

        Raises:
            SpecError: it is neither, or not positive.
        """
        match = _STEPS.match(text)
        try:
            steps = int(match[1]) if match else None
            seconds = None if match else parse_s(text)
        except SpecError:
            steps = 0
        if steps == 0:
            raise SpecError(
                "every must be a number of steps or a time, for instance '100 steps', "
                f"'30 s', '10 min' or '1 h'; got {text!r}"
            )
        return cls(steps, seconds)

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """Return whether this much since the last snapshot is enough."""
        if self.steps is not None:
            return steps >= self.steps
        return self.seconds is not None and seconds >= self.seconds


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One complete snapshot."""

    version: int = VERSION
    run: int
    """Which start of the job, counted from 1."""

    generation: int
    """Which membership of that run; 0 where ranks cannot change."""

    step: int
    """Steps that were committed."""

    epoch: int
    done: int
    """Samples of the epoch in committed steps."""

    samples: int
    """Samples of an epoch; 0 before the first one."""

    seed: int
    ranks: int
    file: str
    """The state's file, in the same folder."""

    size_bytes: int
    sha256: str

    @property
    def order(self) -> tuple[int, int, int]:
        """Higher is newer."""
        return self.run, self.generation, self.step

    @property
    def name(self) -> str:
        """The manifest's own file."""
        return f"{stem_of(self.run, self.generation, self.step)}{_SUFFIX}"


def stem_of(run: int, generation: int, step: int) -> str:
    """Return the beginning of the names of a snapshot's files."""
    return f"run{run}-membership{generation}-step{step}"


def manifests_in(
    folder: Path, damaged: Callable[[Path, Exception], None] | None = None
) -> list[Manifest]:
    """Return a folder's manifests, newest first; those that cannot be read are skipped.

    Args:
        folder: may be missing.
        damaged: called with each that is skipped, and with the reason.

    Raises:
        StrettoError: one was written by a later version.
    """
    found = []
    try:
        paths = sorted(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return []
    for path in paths:
        try:
            require_file(path)
            data = path.read_bytes()
            if msgspec.json.decode(data).get("version", 0) > VERSION:
                raise StrettoError(
                    f"{path} was written by a later version of stretto: use that one, "
                    "or another folder"
                )
            manifest = msgspec.json.decode(data, type=Manifest)
            if not _PLAIN_NAME.match(manifest.file):
                raise ValueError(f"{manifest.file!r} is not the name of a file here")  # noqa: TRY301
            found.append(manifest)
        except (
            OSError,
            ValueError,
            AttributeError,
            TypeError,
            RecursionError,
        ) as error:
            if damaged is not None:
                damaged(path, error)
    return sorted(found, key=lambda manifest: manifest.order, reverse=True)


def require_file(path: Path) -> None:
    """Require that something can be read as a file: no folder, lost link or pipe.

    Raises:
        ValueError: it can't, now or later.
        OSError: the system does not say what it is.
    """
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        is_file = False
    if not is_file:
        raise ValueError(f"{path} cannot be read: it is not a file")


def highest_run_in(folder: Path) -> int:
    """Return the highest run that files of a folder are named after, or 0.

    Damaged ones count too: another start of the job must not write over them.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return 0
    return max((int(m[1]) for n in names if (m := _NAME.match(n))), default=0)


def require_whole(folder: Path, manifest: Manifest) -> None:
    """Compare a snapshot's file with its manifest.

    Raises:
        StrettoError: the file is missing, shorter, changed or no file.
    """
    path = folder / manifest.file
    try:
        require_file(path)
        found = digest_of(path)
    except OSError as error:
        raise StrettoError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StrettoError(str(error)) from error
    if found != (manifest.size_bytes, manifest.sha256):
        raise StrettoError(f"{path} is damaged: it is not what {manifest.name} names")


def digest_of(path: Path) -> tuple[int, str]:
    """Return a file's size in bytes, and its SHA-256.

    Raises:
        OSError: it cannot be read.
    """
    size_bytes, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size_bytes += len(block)
            digest.update(block)
    return size_bytes, digest.hexdigest()


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that it is complete on the disk, or not there at all.

    Raises:
        OSError: it cannot be written; what was there before remains.
    """
    with replacing(path) as file:
        write(file)
    _flush_folder(path.parent)


def remove_old(folder: Path, *, keep: int) -> None:
    """Remove all snapshots but the newest ones, and files that were left incomplete."""
    kept = manifests_in(folder)[:keep]
    if not kept:
        return
    names = {manifest.name for manifest in kept} | {manifest.file for manifest in kept}
    for path in list(folder.iterdir()):
        match = _NAME.match(path.name)
        if match is None or path.name in names:
            continue
        if tuple(map(int, match.groups())) <= kept[0].order:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
