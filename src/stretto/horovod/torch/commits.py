"""Keep committed state on disk for the processes of a restarted job.

# Note [Where commits survive]
When a rank is lost, torchrun's agents end all their processes and start new ones, so
the memory of every rank's process is lost. An agent survives restarts. So the first
process of each host writes every commit into a folder of that host, named after the run
and the agent; new processes of the same agent find it, those of another job do not. A
commit is written to a new file and then renamed: it is either complete or absent. All
ranks continue from the newest commit that any host has.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from stretto import variable_names
from stretto.errors import StrettoError
from stretto.process_identity import stat_row

if TYPE_CHECKING:
    from collections.abc import Mapping


_RUN = "TORCHELASTIC_RUN_ID"
_KEEP = 2

_OWN = re.compile(r"[0-9]+\.(commit|part-[0-9]+)")
"""Names of the files that are written here; the user's folder may have others."""


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of this job's commits on this host; ``None`` without an agent.

    STRETTO_ELASTIC_DIR sets another folder, which also survives the agent.
    """
    given = environment.get(variable_names.ELASTIC_DIR)
    if given:
        return Path(given)
    run = environment.get(_RUN)
    if run is None:
        return None
    agent = os.getppid()
    row = stat_row(agent)  # with its start, since process ids are reused
    started = "0" if row is None else row[1]
    name = f"{run}-{agent}-{started}".replace(os.sep, "_")
    return Path(tempfile.gettempdir()) / f"stretto-elastic-{os.getuid()}" / name


@final
class Commits:
    """The commits in a folder.

    They are pickled, so the folder must belong only to this user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> int:
        """Return the number of the newest commit, or -1 without a commit."""
        return max(self._serials(), default=-1)

    def _serials(self) -> list[int]:
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        stems = [name.removesuffix(".commit") for name in names]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def read(self, serial: int) -> dict[str, Any]:
        """Return a commit's state.

        Raises:
            StrettoError: the folder belongs to another user.
        """
        self._require_mine()
        found: dict[str, Any] = torch.load(
            self._path(serial), map_location="cpu", weights_only=False
        )
        return found

    def write(self, serial: int, state: dict[str, Any]) -> None:
        """Add a commit and delete old ones."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._require_mine()
        part = self._folder / f"{serial}.part-{os.getpid()}"
        torch.save(state, part)
        part.replace(self._path(serial))
        for old in self._serials()[:-_KEEP]:
            self._path(old).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all commits, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if _OWN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _path(self, serial: int) -> Path:
        return self._folder / f"{serial}.commit"

    def _require_mine(self) -> None:
        found = self._folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise StrettoError(
                f"commits are read only from a folder that no other user can write: "
                f"{self._folder} has mode {found.st_mode & 0o777:o} and owner "
                f"{found.st_uid}. Remove it, or set another one in "
                f"{variable_names.ELASTIC_DIR}."
            )
