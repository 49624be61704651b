"""Start supervisors: by a fork, or ``python -m stretto.cluster.supervisor_start``.

# Note [Guards]
Each supervisor is the child of a guard, a process that waits for its end. Both adopt
orphans, so whatever ranks have started stays below them: in any session, group or
environment. If the supervisor is killed, all of it comes to the guard, which kills it.
The guard holds the attempt's lock, too, so the attempt lasts until that is done. Agents
cannot be guards, because supervisors outlive them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from stretto.cluster import processes
from stretto.cluster.channel import listening
from stretto.cluster.part_spec import END_FILE, LOCK_FILE, SOCKET_FILE, write_json
from stretto.cluster.supervisor import Supervisor
from stretto.lab import syscalls

_TRACE_LINES = 20
_RETRY_S = 1.0


def start(folder: Path, *, forks: bool) -> int | None:
    """Start the supervisor of the attempt in a folder; return its guard's process id.

    Its socket listens when this returns.

    Args:
        folder: of the attempt, with its file.
        forks: fork this process, which must have one thread, instead of starting
            Python again (3 ms against 150).

    Returns:
        The process id, or ``None`` if the attempt has a supervisor already.

    Raises:
        OSError: the folder cannot be written, or no process can be started.
    """
    lock = processes.lock(folder / LOCK_FILE)
    if lock is None:
        return None
    listener = None
    try:
        listener = listening(folder / SOCKET_FILE)
        if forks:
            pid = os.fork()
            if not pid:
                _run_forked(folder, lock, listener)
            return pid
        inherited = [lock, listener.fileno()]
        command = [*processes.PYTHON, "-m", __name__, str(folder)]
        process = subprocess.Popen(
            [*command, *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=inherited,
        )
        process.returncode = 0  # the caller reaps its children
        return process.pid
    finally:
        os.close(lock)
        if listener is not None:
            listener.close()


def _run_forked(folder: Path, lock: int, listener: socket.socket) -> None:
    """Run as a forked child, and end."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        processes.detach(keep=(lock, listener.fileno()))
        _run_guarded(folder, lock, listener)
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the agent
        _write_crash(folder, traceback.format_exc())
    finally:
        processes.kill_children()
        os._exit(status)


def _run_guarded(folder: Path, lock: int, listener: socket.socket) -> None:
    """Run the supervisor in a child and its guard in this process: Note [Guards]."""
    syscalls.adopt_orphans()
    supervisor = os.fork()
    if not supervisor:
        os.setsid()
        processes.note_owner(lock)
        Supervisor(folder, listener).run()
        return
    listener.close()  # no agent may connect once the supervisor has ended
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.waitpid(supervisor, 0)
    while not processes.kill_children():
        time.sleep(_RETRY_S)


def _write_crash(folder: Path, trace: str) -> None:
    """Write how the attempt ended, unless it had ended before its supervisor failed."""
    if read_end(folder) is not None:
        return
    lines = "".join(f"\n  | {line}" for line in trace.splitlines()[-_TRACE_LINES:])
    end = {
        "code": 1,
        "why": f"the supervisor of the attempt failed:{lines}",
        "signaled": False,
    }
    with contextlib.suppress(OSError):
        write_json(folder / END_FILE, end)


def main(folder: str, lock: str, listener: str) -> None:
    """Run the supervisor of an attempt; lock and listener are open descriptors."""
    for each in (lock, listener):
        os.set_inheritable(int(each), False)  # noqa: FBT003
    _run_forked(Path(folder), int(lock), socket.socket(fileno=int(listener)))


def read_end(folder: Path) -> dict[str, Any] | None:
    """Return how an attempt ended, if its supervisor could say so."""
    try:
        found = json.loads((folder / END_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "code" in found else None


if __name__ == "__main__":
    main(*sys.argv[1:])
