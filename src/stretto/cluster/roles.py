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
from stretto.logs import get_logger
from stretto.process_identity import stat_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

_log = get_logger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
"""Between two starts of a process that ends at once."""

_DETACHED_PAUSE_S = 2.0
"""The first pause, where only the lock shows whether the process runs."""

_STEADY_S = 10.0

_ENDED = "ZX"
"""States of a process that has ended."""

STOPPED_S = 2.0
"""How long a signal may stop a process before it is continued: an agent, before its
host counts as silent."""

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

    @property
    def child(self) -> int | None:
        """The process that `look` has started last, if it runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def look(self) -> None:
        """Start the process if none runs and its pause has passed.

        Raises:
            OSError: it cannot be started for now.
        """
        if self.child is not None:
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


@final
class StoppedHolders:
    """Continues processes that a signal has stopped, by the locks they hold.

    A stopped process keeps its lock, so no other one takes its place; and the
    coordinator answers no agent, so the watchdogs of all jobs would fire.
    """

    def __init__(
        self, locks: Callable[[], Iterable[Path]], roles: Iterable[Role] = ()
    ) -> None:
        """Look after processes.

        Args:
            locks: returns the locks whose holders are looked after at each look.
            roles: whose processes are looked after before they hold their locks, too.
        """
        self._locks, self._roles = locks, tuple(roles)
        self._since_s: dict[int, float] = {}

    def look(self) -> None:
        """Continue those that have been stopped for `STOPPED_S`."""
        found = stopped_holders(self._locks())
        for role in self._roles:
            if (pid := role.child) is not None and _is_stopped(pid):
                found[pid] = role.lock
        for pid in self._since_s.keys() - found.keys():
            del self._since_s[pid]
        for pid, lock in found.items():
            if now_s() - self._since_s.setdefault(pid, now_s()) >= STOPPED_S:
                _log.warning("process %d (%s) is stopped: continues it", pid, lock)
                send(pid, signal.SIGCONT)


def stopped_holders(locks: Iterable[Path]) -> dict[int, Path]:
    """Return the processes that hold a lock and are stopped by a signal."""
    found = {}
    for lock in locks:
        for pid in _holders(lock):
            if _is_stopped(pid):
                found[pid] = lock
    return found


def _holders(lock: Path) -> list[int]:
    """Return the processes that hold a lock.

    A guard holds the lock of its supervisor, too, and beyond the end of that one.
    """
    if not processes.is_locked(lock):
        return []
    pid = _noted(lock)
    row = None if pid is None else stat_row(pid)
    if pid is not None and row is not None and row[0] not in _ENDED:
        return [pid]
    return processes.lock_holders(lock.parent, lock.name).get(lock, [])


def _is_stopped(pid: int) -> bool:
    row = stat_row(pid)
    return row is not None and row[0] == "T"


def continue_stopped(locks: Iterable[Path]) -> bool:
    """Continue holders of locks that a signal has stopped; return whether any was."""
    found = stopped_holders(locks)
    for pid in found:
        send(pid, signal.SIGCONT)
    return bool(found)


def continue_process(pid: int) -> None:
    """Continue a process if a signal has stopped it."""
    if _is_stopped(pid):
        send(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """Kill a process, if it runs."""
    send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it runs."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def holder_of(lock: Path) -> int | None:
    """Return the process that holds a file's lock and wrote its number there."""
    return _noted(lock) if processes.is_locked(lock) else None


def _noted(lock: Path) -> int | None:
    """Return the number that the last holder of a lock wrote there."""
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return None


def end_holders(locks: Sequence[Path], *, timeout_s: float) -> bool:
    """Ask the processes that hold locks to end; return whether all did in time.

    Those that did not are killed. One whose number is not known, because there was no
    space to write it, is only waited for.
    """
    deadline_s = now_s() + timeout_s
    while held := [lock for lock in locks if processes.is_locked(lock)]:
        is_late = now_s() > deadline_s
        for pid in [pid for lock in held if (pid := _noted(lock)) is not None]:
            send(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            send(pid, signal.SIGCONT)  # a stopped one takes no other signal
        if is_late:
            return False
        time.sleep(0.05)
    return True
