"""Processes that should run, one of each, and how they are ended.

Each takes a lock on a file for as long as it lives and writes its number there, so none
runs twice, and the kernel releases the lock however the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, final

from stretto.cluster import processes
from stretto.cluster.loop import now_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
"""Between two starts of a process that ends at once."""

_DETACHED_PAUSE_S = 2.0
"""The first pause, where only the lock shows whether the process runs."""

_STEADY_S = 10.0

_IN_BACKGROUND = ("/bin/sh", "-c", '"$@" &', "sh")
"""Starts a command as a process that is not a child of the one that started it."""


@final
class Role:
    """A process that should run."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        lock: Path,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        detaches: bool = False,
    ) -> None:
        """Name a process; `look` starts it.

        Args:
            module: what Python runs.
            arguments: of the module.
            lock: the file whose lock the process holds while it lives.
            log: the file that gets its output.
            environment: of the process; ``None``: this process's.
            detaches: the process is not to be a child of this one, which may end its
                children when it ends.
        """
        self.lock, self.log = lock, log
        command = (*processes.PYTHON, "-m", module, *arguments)
        self._command = (*_IN_BACKGROUND, *command) if detaches else command
        self._environment = environment
        self._first_pause_s = _DETACHED_PAUSE_S if detaches else _FIRST_PAUSE_S
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s, self._pause_s = 0.0, 0.0

    def look(self) -> None:
        """Start the process if none runs and its pause has passed.

        Raises:
            OSError: it cannot be started for now.
        """
        if self._process is not None and self._process.poll() is None:
            return
        if processes.is_locked(self.lock):  # started by another one
            return
        age_s = now_s() - self._started_s
        if age_s > _STEADY_S:
            self._pause_s = 0.0
        elif age_s < self._pause_s:
            return
        self._pause_s = min(_MAX_PAUSE_S, max(self._first_pause_s, 2 * self._pause_s))
        self._started_s = now_s()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self._environment,
                start_new_session=True,
            )


def holder_of(lock: Path) -> int | None:
    """Return the process that holds a file's lock and wrote its number there."""
    if not processes.is_locked(lock):
        return None
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return None


def end_holders(locks: Sequence[Path], *, timeout_s: float) -> bool:
    """Ask the processes that hold locks to end; return whether all did in time."""
    deadline_s = now_s() + timeout_s
    while holders := [pid for lock in locks if (pid := holder_of(lock)) is not None]:
        for pid in holders:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        if now_s() > deadline_s:
            return False
        time.sleep(0.05)
    return True
