"""Give this process's threads less of the processors than any foreground's.

# Note [Priority and task groups]
The scheduler first divides a processor between task groups, then within one. With
autogroups each session is a group, and so is each cgroup. nice and SCHED_IDLE act
within a group only: a background in a session of its own takes half of a core, whatever
they are. So this process moves to a cgroup with ``cpu.idle``, as near to the root as is
permitted. If it may not, it lowers its session's autogroup and itself. The autogroup
outlives this process, whose parents are in it: a guard restores it if this process is
killed.

Whether that works depends on groups that this process may not even see. So `lower` ends
with a test: two busy loops on one core, one started before and one after the change.
The first joins the foreground's cgroup, if there is a foreground and it is permitted.

# Note [Which cgroups a process may leave]
A child of the process's own cgroup is idle only relative to that cgroup's other
children. A child of the root is idle relative to everything. But with cgroup v2 a
process that moves up leaves the limits of memory, processes and cores that a container
or a service has been given. So a level with limits is never left.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto.logs import get_logger
from stretto.process_identity import process_ids, stat_fields, stat_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CGROUP, SESSION, SCHEDULER = "cgroup", "session", "scheduler"
METHODS = (CGROUP, SESSION, SCHEDULER)
"""In the order in which they are tried: a cgroup with ``cpu.idle``; the session's
autogroup and SCHED_IDLE; SCHED_IDLE alone."""

MAX_RATIO = 0.05
"""Processor time over that of a foreground beside it, at most, if priority works."""

_LOOP_S = 0.05
_ANSWER_S = 10.0
_NICE = 19
_NAME = "stretto-background-"
_ENTERED_S = 60.0
"""Time in which a background enters the cgroup that it has made."""

_PROC = Path("/proc")

_LIMITS = {
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "pids.max": "max",
    "cpu.max": "max",
    "cpuset.cpus": "",
    "io.max": "",
    "cpu.cfs_quota_us": "-1",
}
"""Limits of a cgroup, of both versions, and how the missing limit is written."""

_AGAIN_S, _AGAIN_PAUSE_S = 5.0, 0.05
"""How long, and how often, to try a write that the kernel permits once in 0.1 s."""

_GUARD = """exec 3<&0
(
    trap '' HUP INT QUIT TERM
    read line <&3 && exit  # it is restored
    left=100
    until echo "$1" > /proc/self/autogroup || [ $left -eq 0 ]; do
        left=$((left - 1))
        sleep 0.1
    done
) 2>/dev/null &
"""
"""For a shell: set the session's autogroup to $1 once a pipe ends without a line. The
guard is no child of the process that it watches, which may wait for its children."""

_LOOP = "read line || exit; echo ready; while kill -0 $PPID; do :; done 2>/dev/null"
"""For a shell, which starts in a millisecond; a background may have to wait long for
more processor time. It ends once the process that started it has ended."""

_log = get_logger(__name__)


@final
@dataclass(slots=True, kw_only=True)
class Isolation:
    """How a background's processor time is kept from the foreground."""

    method: str
    """One of `METHODS`; empty if none was permitted."""

    detail: str
    """The change that was made, or why it could not be."""

    ratio: float | None = None
    """Processor time of a busy loop after the change over one before it, on one core;
    ``None`` if it was not measured."""

    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    raise_session: Callable[[], None] | None = field(default=None, repr=False)
    """Restores the autogroup of this session, if it was lowered."""

    @property
    def works(self) -> bool:
        """Whether the test showed that a foreground comes first."""
        return self.ratio is not None and self.ratio <= MAX_RATIO

    def extend_to(self, pids: Iterable[int]) -> None:
        """Lower the sessions that children have opened, where sessions are groups.

        Children inherit all else.
        """
        if self.method != SESSION:
            return
        for pid in pids:
            file = _PROC / f"{pid}/autogroup"
            with contextlib.suppress(OSError):
                if os.getsid(pid) == os.getsid(0) or _nice_of(file) == str(_NICE):
                    continue
                file.write_text(str(_NICE))  # or at the next look, see `_write`

    def meet(self, foreground_pid: int) -> None:
        """Restore the session if a foreground that began later is in it.

        Within a session SCHED_IDLE is enough.
        """
        if self.raise_session is not None and _shares_session(foreground_pid):
            with contextlib.suppress(OSError):
                self.raise_session()
                self.raise_session = None
                self.detail = "SCHED_IDLE within the foreground's session"

    def __str__(self) -> str:
        """Return one line for logs and `stretto doctor`."""
        if self.ratio is None:
            return f"{self.detail}; not tested"
        return (
            f"{self.detail}; a busy loop takes {self.ratio:.3f} of a foreground's "
            "processor time beside it"
        )

    def restore(self) -> None:
        """Undo what the system permits to undo, and remove what was created."""
        while self.undo:
            with contextlib.suppress(OSError):
                self.undo.pop()()


def lower(
    methods: Sequence[str] = METHODS, *, foreground_pid: int = 0, test: bool = True
) -> Isolation:
    """Lower this process's priority below every foreground's, and test that it works.

    Threads and child processes that it starts later inherit it. A cgroup made here is
    removed at exit.

    Args:
        methods: which of `METHODS` to try.
        foreground_pid: the foreground, if it is known: a session that it shares with
            this process is left as it is.
        test: measure `Isolation.ratio`, in about 0.2 s.
    """
    shares = _shares_session(foreground_pid)
    reference = _Loop(new_session=not shares) if test else None
    try:
        if reference is not None and foreground_pid:
            reference.join(foreground_pid)
        found = _lowered(methods, shares=shares)
        if reference is not None:
            found.ratio = _ratio(reference)
    finally:
        if reference is not None:
            reference.close()
    owner = os.getpid()
    atexit.register(_restore_at_exit, found, owner)
    return found


def _restore_at_exit(found: Isolation, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        found.restore()


def _lowered(methods: Sequence[str], *, shares: bool) -> Isolation:
    refused = []
    for method in methods:
        try:
            if method == CGROUP:
                return _enter_idle_cgroup()
            if method == SESSION:
                return _lower_session(shares=shares)
            return _lower_threads()
        except OSError as exc:
            refused.append(f"{method}: {exc.strerror or exc}")
    return Isolation(
        method="", detail="no priority below a foreground's: " + "; ".join(refused)
    )


# cgroups


def _enter_idle_cgroup() -> Isolation:
    """Move this process to a new cgroup with ``cpu.idle``.

    Raises:
        OSError: no cgroup with processors may be created.
    """
    own = own_cgroup()
    last: OSError = OSError("no cgroup with processors is mounted")
    for parent in _levels(own):
        # Containers that share this folder may have equal process ids.
        made = parent / f"{_NAME}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            made.mkdir()
        except OSError as exc:
            last = exc
            continue
        try:
            (made / "cpu.idle").write_text("1")
            (made / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as exc:
            last = exc
            made.rmdir()
            continue
        _remove_left(parent, made)  # also that of a program which became this one
        return Isolation(
            method=CGROUP,
            detail=f"cgroup {made} with cpu.idle",
            undo=[functools.partial(_remove, made), functools.partial(_move_to, own)],
        )
    raise last


def _remove(made: Path) -> None:
    """Remove a cgroup, at the latest when processes that are still in it have ended.

    At its exit `multiprocessing` ends daemons and joins the others, later than this.
    """
    if not _is_removed(made):
        Finalize(None, _is_removed, args=(made,), exitpriority=-100)


def _is_removed(made: Path) -> bool:
    try:
        made.rmdir()
    except OSError:
        return False
    return True


def _move_to(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def own_cgroup(proc: Path = _PROC, pid: int | str = "self") -> Path:
    """Return the folder of a process's cgroup that divides processors.

    Args:
        proc: where the system describes processes.
        pid: whose; this process's if not given.

    Raises:
        OSError: no such cgroup is mounted.
    """
    paths = {"": "/"}
    for line in _lines(proc / f"{pid}/cgroup"):
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    mounts = [line.split(" ")[1:4] for line in _lines(proc / "self/mounts")]
    for kind, controller in (("cgroup", "cpu"), ("cgroup2", "")):
        for where, mounted, options in mounts:
            if mounted == kind and (not controller or "cpu" in options.split(",")):
                found = Path(where, paths.get(controller, "/").lstrip("/"))
                # In a container the path may be that of the host.
                return found if found.is_dir() else Path(where)
    raise OSError("no cgroup with processors is mounted")


def _lines(file: Path) -> list[str]:
    """Return a file's lines; the names in them may be bytes of any encoding."""
    text = os.fsdecode(file.read_bytes())
    return [line for line in text.split("\n") if line]


def _levels(own: Path) -> Iterator[Path]:
    """Yield cgroups in which a child may be created, the highest first."""
    found = [own]
    while (found[-1].parent / "cgroup.procs").exists() and not _has_limits(found[-1]):
        found.append(found[-1].parent)
    yield from reversed(found)


def _has_limits(cgroup: Path) -> bool:
    for name, unlimited in _LIMITS.items():
        with contextlib.suppress(OSError):
            text = (cgroup / name).read_text().strip()
            if not (text.startswith(unlimited) if unlimited else text == ""):
                return True
    return False


def _remove_left(parent: Path, made: Path) -> None:
    """Remove the cgroups of backgrounds that were killed.

    Another process may have their process ids by now. A cgroup with processes in it is
    not removed, and a background enters its own at once.
    """
    now_s = made.stat().st_mtime
    for left in parent.glob(f"{_NAME}*"):
        pid, _, _ = left.name.removeprefix(_NAME).partition("-")
        with contextlib.suppress(OSError, ValueError):
            row = None if int(pid) == os.getpid() else stat_row(int(pid))
            has_ended = row is None or row[0] in "ZXx"
            if has_ended or now_s - left.stat().st_mtime > _ENTERED_S:
                left.rmdir()


# sessions and threads


def _shares_session(foreground_pid: int) -> bool:
    if not foreground_pid:
        return False
    try:
        return os.getsid(foreground_pid) == os.getsid(0)
    except OSError:
        return False


def _lower_session(*, shares: bool) -> Isolation:
    """Lower the autogroup of this session, and this process in it.

    Raises:
        OSError: there are no autogroups, or others of the session would be lowered too.
    """
    file = _PROC / "self/autogroup"
    before = _nice_of(file)
    if (_PROC / "sys/kernel/sched_autogroup_enabled").read_text().strip() != "1":
        raise OSError("autogroups are switched off")
    if shares or _others_in_session():
        raise OSError("other processes are in this session; start it with setsid")
    guard = _Guard(before)
    try:
        _write(file, str(_NICE))
        found = _lower_threads()
    except BaseException:
        guard.restore()
        raise
    found.method = SESSION
    found.detail = f"autogroup of the session at nice {_NICE}, and {found.detail}"
    found.undo.insert(0, guard.restore)
    found.raise_session = guard.restore
    return found


def _nice_of(autogroup: Path) -> str:
    return autogroup.read_text().rpartition(" ")[2].strip()


@final
class _Guard:
    """Restores the autogroup of this session, also if this process is killed."""

    def __init__(self, nice: str) -> None:
        self._nice, self._owner = nice, os.getpid()
        read, self._write = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _GUARD, "sh", nice],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                check=True,
            )
        except subprocess.CalledProcessError as exc:
            os.close(self._write)
            raise OSError("no guard of the session starts") from exc
        except BaseException:
            os.close(self._write)
            raise
        finally:
            os.close(read)

    def restore(self) -> None:
        """Restore it, once."""
        if self._write < 0 or os.getpid() != self._owner:
            return
        # If this fails, the guard tries again when the pipe ends.
        _write(_PROC / "self/autogroup", self._nice)
        with contextlib.suppress(OSError):
            os.write(self._write, b"\n")
        os.close(self._write)
        self._write = -1


def _write(file: Path, text: str) -> None:
    """Write an autogroup's nice value.

    Without privileges this is permitted once in 0.1 s, to all processes together.
    """
    deadline_s = time.perf_counter() + _AGAIN_S
    while True:
        try:
            file.write_text(text)
        except BlockingIOError:
            if time.perf_counter() > deadline_s:
                raise
            time.sleep(_AGAIN_PAUSE_S)
        else:
            return


def _others_in_session() -> bool:
    """Return whether this session has processes besides our parents and children."""
    rows = {}
    for pid in process_ids():
        fields = stat_fields(pid)
        if fields is not None:
            rows[pid] = (int(fields[1]), int(fields[3]))

    def ancestors(pid: int) -> Iterator[int]:
        while pid in rows:
            yield pid
            pid = rows[pid][0]

    own, session = os.getpid(), os.getsid(0)
    ours = set(ancestors(own))
    return any(
        sid == session and pid not in ours and own not in ancestors(pid)
        for pid, (_, sid) in rows.items()
    )


def _lower_threads() -> Isolation:
    """Set SCHED_IDLE for all threads of this process.

    Raises:
        OSError: it is not permitted.
    """
    for task in _threads():
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
    return Isolation(method=SCHEDULER, detail="SCHED_IDLE", undo=[_raise_threads])


def _raise_threads() -> None:
    for task in _threads():
        os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))


def _threads() -> list[int]:
    return [int(task.name) for task in (_PROC / "self/task").iterdir()]


# the test


@final
class _Loop:
    """A process that computes on one core, from `start` to `close`."""

    def __init__(self, *, new_session: bool) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=new_session,
        )
        os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})
        # The processor time of another process, see clock_getcpuclockid(3).
        self._clock = (~self._process.pid << 3) | 2

    def join(self, pid: int) -> None:
        """Move to another process's cgroup, if that is permitted."""
        with contextlib.suppress(OSError):
            procs = own_cgroup(pid=pid) / "cgroup.procs"
            procs.write_text(str(self._process.pid))

    def start(self, *, waits: bool = True) -> None:
        """Start to compute.

        Args:
            waits: return once it does.

        Raises:
            OSError: it does not.
        """
        send, answer = self._process.stdin, self._process.stdout
        if send is None or answer is None:
            raise AssertionError("a loop has no pipes")
        send.write(b"\n")
        send.flush()
        if not waits:
            return
        if not select.select([answer], [], [], _ANSWER_S)[0] or not answer.readline():
            raise OSError("a busy loop did not start")

    @property
    def wants_processor(self) -> bool:
        """Whether it computes, or would if the processor were free."""
        row = stat_row(self._process.pid)
        return row is not None and row[0] == "R"

    def used_s(self) -> float:
        """Return its processor time so far."""
        return time.clock_gettime(self._clock)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _ratio(reference: _Loop) -> float | None:
    """Return the processor time of a loop started now over that of the reference."""
    low = _Loop(new_session=False)
    try:
        # Where others fill the core, a loop of low priority does not even answer.
        low.start(waits=False)
        reference.start()
        ratios = [_ratio_now(reference, low)]
        if not low.wants_processor:
            return None
        # A ratio between the two cases is noise: measure it again.
        while len(ratios) < 3 and MAX_RATIO < ratios[-1] < 0.5:
            ratios.append(_ratio_now(reference, low))
    except OSError:
        return None
    finally:
        low.close()
    return statistics.median_low(ratios)


def _ratio_now(reference: _Loop, low: _Loop) -> float:
    before_s = reference.used_s(), low.used_s()
    # On a busy core the reference may have to wait for its share.
    used_s, deadline_s = 0.0, time.perf_counter() + _ANSWER_S
    while used_s < _LOOP_S / 2 and time.perf_counter() < deadline_s:
        time.sleep(_LOOP_S)
        used_s = reference.used_s() - before_s[0]
    return (low.used_s() - before_s[1]) / max(used_s, 1e-9)


def probe(methods: Sequence[str] = METHODS, *, limit_s: float = 60.0) -> Isolation:
    """Return what `lower` would find, by trying it in a child process.

    Args:
        methods: which of `METHODS` to try.
        limit_s: how long to wait for the child, in seconds. Where other programs take
            all processors, a process of low priority may never answer.
    """
    code = (
        "import json, sys\n"
        "from stretto.background.priority import lower\n"
        "found = lower(json.loads(sys.argv[1]))\n"
        "print(json.dumps([found.method, found.detail, found.ratio]))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(list(methods))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end_lowered(child.pid)
        child.communicate()
        return Isolation(
            method="",
            detail="the test of priorities did not end within "
            f"{limit_s:g} s, because other programs take all processors",
        )
    try:
        method, detail, ratio = json.loads(out)
    except ValueError:
        reason = (err.strip().splitlines() or ["no answer"])[-1]
        return Isolation(method="", detail=f"the test of priorities failed: {reason}")
    return Isolation(method=method, detail=detail, ratio=ratio)


def _end_lowered(leader: int) -> None:
    """End a session that has lowered itself.

    A killed process needs processor time to end, so it is given back its priority.
    """
    members = process_ids()
    for pid in members:
        with contextlib.suppress(OSError):
            if os.getsid(pid) != leader:
                continue
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                made = own_cgroup(pid=pid)
                if made.name.startswith(_NAME):
                    (made.parent / "cgroup.procs").write_text(str(pid))
            with contextlib.suppress(OSError):
                _write(_PROC / f"{pid}/autogroup", "0")
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
