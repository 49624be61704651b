"""Trees of processes: adopt, find and end what an attempt has started."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.background.priority import own_cgroup
from stretto.process_identity import children_of, process_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PYTHON = (sys.executable, "-P", "-X", "utf8")
"""Starts Python for a process of the cluster: paths in JSON are UTF-8, whatever the
locale is of who started it."""

_PROC = Path("/proc")

_REMOVED = " (deleted)"
"""Follows the path of an open file that was removed, in ``/proc``."""

_CLEAN_LOOKS = 3
"""Looks at all processes, one after the other, that must find none."""


def _entries() -> Iterator[tuple[int, Path]]:
    """Yield all processes, each with its folder in ``/proc``."""
    for pid in process_ids():
        yield pid, _PROC / str(pid)


def kill_children(*, attempts: int = 200) -> bool:
    """Kill all descendants of this process, which must adopt orphans.

    Returns:
        Whether all have ended that this user may end. One that the kernel cannot end,
        such as in a read from a lost file server, remains.
    """
    for _ in range(attempts):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no child is left
            return True
        children = children_of(os.getpid())
        others = 0
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it became another user's, as by sudo
                others += 1
            except ProcessLookupError:
                pass
        if children and others == len(children):
            return True
        time.sleep(0.005)
    return False


def marked_processes(variable: str, value: str, *more: str) -> list[int]:
    """Return this user's living processes that were started with a variable.

    Children inherit it, whatever session or group they open.

    Args:
        variable: its name.
        value: its value.
        more: other variables that they must have, each as ``NAME=VALUE``.
    """
    marks = {os.fsencode(mark) for mark in (f"{variable}={value}", *more)}
    found = []
    for pid, entry in _entries():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if marks.issubset((entry / "environ").read_bytes().split(b"\0")):
                found.append(pid)
    return found


def kill_marked(variable: str, value: str, *more: str, attempts: int = 50) -> bool:
    """Kill what `marked_processes` finds; return whether all have ended.

    One look misses a process that is forked, or runs another program, during the look.
    """
    clean_looks = 0
    for _ in range(attempts):
        found = marked_processes(variable, value, *more)
        clean_looks = 0 if found else clean_looks + 1
        if clean_looks == _CLEAN_LOOKS:
            return True
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return False


def lock_holders(
    root: Path, name: str, *, removed: bool = False
) -> dict[Path, list[int]]:
    """Return this user's processes that hold locks of files below a folder.

    It looks at the processes, so a lock whose file was removed is found, too. This
    takes longer than `is_locked`: a few milliseconds per hundred processes.

    Args:
        root: the folder.
        name: of the files.
        removed: only files that were removed.

    Returns:
        The processes by the path that the file has, or had.
    """
    base = os.path.realpath(root) + "/"
    found: dict[Path, list[int]] = {}
    for pid, entry in _entries():
        # Another user's process, or one that ends meanwhile, cannot be looked at.
        with contextlib.suppress(OSError):
            for number in os.listdir(entry / "fd"):  # noqa: PTH208
                link = os.readlink(f"{entry}/fd/{number}")  # noqa: PTH115
                path = link.removesuffix(_REMOVED)
                if removed and path == link:
                    continue
                if not (path.startswith(base) and path.endswith(f"/{name}")):
                    continue
                if "FLOCK" in (entry / "fdinfo" / number).read_text():
                    found.setdefault(root / path[len(base) :], []).append(pid)
    return found


def processes_of(*arguments: str) -> list[int]:
    """Return the living processes of this user whose command has some arguments.

    Args:
        arguments: what the command has, one after the other.
    """
    wanted = b"\0" + b"\0".join(map(os.fsencode, arguments)) + b"\0"
    found = []
    for pid, entry in _entries():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.geteuid():
                continue
            if wanted in (entry / "cmdline").read_bytes():  # empty of an ended one
                found.append(pid)
    return found


def lock(path: Path, *, shared: bool = False, patience_s: float = 0.2) -> int | None:
    """Return a descriptor that holds a file's lock; ``None`` if another holds it.

    The kernel releases the lock when the last process with the descriptor ends.

    Args:
        path: the file, which is created if needed.
        shared: others may hold it, too, if they share it.
        patience_s: how long to try; `is_locked` holds a lock for a moment.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                return None
            time.sleep(0.01)
        else:
            return descriptor


def lock_as_owner(path: Path) -> int | None:
    """Return a file's lock as `lock` does, and write this process's number there."""
    descriptor = lock(path)
    if descriptor is not None:
        note_owner(descriptor)
    return descriptor


def note_owner(descriptor: int) -> None:
    """Write this process's number into a file, or nothing if the disk is full.

    What is there is overwritten first: a full disk has no room for what is new.
    """
    number = str(os.getpid()).encode()
    try:
        size = os.pwrite(descriptor, number, 0)
    except OSError:
        size = 0
    os.ftruncate(descriptor, size if size == len(number) else 0)


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a file's lock, or may hold it.

    What holds a lock that cannot be looked at, because descriptors are scarce or the
    file is another user's, is not known to have ended.
    """
    try:
        descriptor = _opened(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _opened(path: Path) -> int:
    """Return a descriptor of a file, for reading alone if it cannot be written.

    Some network file systems lock only what is open for writing.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def start_detached(command: Sequence[str], log: Path) -> None:
    """Start a process that outlives this one, in a session of its own."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    process.returncode = 0  # nothing waits for it


def detach(*, keep: tuple[int, ...] = ()) -> None:
    """Make a forked child independent: a session of its own, no descriptors but some.

    Standard input, output and error become ``/dev/null`` unless they are kept.
    """
    os.setsid()
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard not in keep:
            os.dup2(null, standard)
    kept = {0, 1, 2, *keep}
    for each in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if each not in kept:
            with contextlib.suppress(OSError):
                os.close(each)


def raise_priority(pid: int) -> None:
    """Give a process that has lowered its priority an ordinary one, where permitted.

    On busy processors a background would take long to save its work, and even to die.
    """
    with contextlib.suppress(OSError):
        (own_cgroup() / "cgroup.procs").write_text(str(pid))
    with contextlib.suppress(OSError):
        (_PROC / str(pid) / "autogroup").write_text("0")
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


def reset_priority() -> str:
    """Run as an ordinary process whatever the starter was; return why not, or empty."""
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except OSError as error:
        return (
            f"priority stays at nice {os.getpriority(os.PRIO_PROCESS, 0)}: "
            f"{error.strerror}"
        )
    return ""
