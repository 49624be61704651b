"""The process that keeps a lab running; ``python -m stretto.lab.supervisor FD``.

There are three processes above the ranks::

    stretto          reads reports, writes the control pipe
      launcher       this module: makes the namespaces, waits
        supervisor   this module: process 1 of the lab, starts and ends the ranks
          rank 0, rank 1, ...

The kernel kills the launcher when `stretto` ends, the supervisor when the launcher
ends, and the rest of the lab when its process 1 ends; the network disappears with the
last process. The supervisor also ends itself when the control pipe closes. So nothing
needs to be cleaned up, and `kill -9` of any of them leaves nothing behind.

Without namespaces (paced mode) the launcher itself is the supervisor, adopts the
orphans of its ranks, and kills them one by one.

Standard input is the control pipe: one line of JSON (a ``LabJob``), then ``INT`` or
``TERM`` lines. Reports are lines of JSON on descriptor FD.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stretto.errors import LabError
from stretto.lab import network, syscalls
from stretto.lab.faults import FaultInjector
from stretto.lab.spec import TIMEOUT_STATUS, LabJob, Mode, host_name, rank_environment
from stretto.process_identity import children_of
from stretto.step_counts import StepCounts

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTROL_FD = 0
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_KILL_AFTER_S = 3.0
_INTERRUPT_GRACE_S = 5.0
_TIME_SLICE_S = 1e-4
_FAULTS_EVERY_S = 0.005


class _Reports:
    """Sends lines of JSON to the process that requested the lab."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, **report: Any) -> None:
        # A reader that has exited needs no report; its end also ends this process.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(report).encode() + b"\n")


def main(report_fd: int) -> int:
    """Launch the lab that standard input describes; return 0 whatever its outcome."""
    os.set_inheritable(report_fd, False)  # noqa: FBT003
    reports = _Reports(report_fd)
    job = _read_job()
    if job is None:
        return 0
    if job.mode == Mode.PACED.value:
        # This process must not die with its parent: the end of the control pipe
        # notifies it, and it still has to kill what the ranks have started.
        syscalls.adopt_orphans()
        _Supervisor(job, reports, hosts=[], home=None).run()
        return 0
    try:
        _enter_namespaces()
    except OSError as error:
        reports.send(unavailable=f"no permission for namespaces ({error})")
        return 0
    # Only now, because a change of credentials, as by a user namespace, undoes it.
    syscalls.die_with_parent()
    if os.getppid() != job.parent_pid:
        return 0
    pid = os.fork()
    if pid == 0:
        syscalls.die_with_parent()
        _run_as_init(job, reports)
        os._exit(0)
    os.close(report_fd)
    os.waitpid(pid, 0)
    return 0


def _read_job() -> LabJob | None:
    """Return the job on the control pipe; None if its writer ended first."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # Byte-exact reading is not needed: nothing follows before a report is sent.
        piece = os.read(_CONTROL_FD, _CHUNK_BYTES)
        if not piece:
            return None
        line += piece
    return LabJob(**json.loads(line))


def _enter_namespaces() -> None:
    """Leave the host's namespaces, as root or as any user in a user namespace."""
    flags = (
        syscalls.CLONE_NEWNS
        | syscalls.CLONE_NEWPID
        | syscalls.CLONE_NEWNET
        | syscalls.CLONE_NEWUTS
        | syscalls.CLONE_NEWIPC
    )
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            syscalls.unshare(flags)
        except PermissionError:
            # Root of a container without CAP_SYS_ADMIN has no more privileges than a
            # user.
            pass
        else:
            return
    syscalls.unshare(syscalls.CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _run_as_init(job: LabJob, reports: _Reports) -> None:
    """Build the network and run the job as process 1 of the new namespaces."""
    try:
        syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
        # A container that masks parts of /proc forbids this; then tools see the process
        # numbers outside, which training tolerates.
        with contextlib.suppress(OSError):
            syscalls.mount(
                "proc",
                "/proc",
                "proc",
                syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC,
            )
        home, hosts = network.build(job.spec, job.tools_env)
    except (OSError, LabError) as error:
        reports.send(unavailable=str(error))
        return
    _Supervisor(job, reports, hosts=hosts, home=home).run()


class _Supervisor:
    """Starts the ranks, passes on rank 0's output, and ends all when one fails."""

    def __init__(
        self,
        job: LabJob,
        reports: _Reports,
        *,
        hosts: list[network.Host],
        home: network.Host | None,
    ) -> None:
        self._job = job
        self._spec = job.spec
        self._reports = reports
        self._hosts = hosts
        self._home = home
        self._selector = selectors.DefaultSelector()
        self._wake_fd = _wake_on_child()
        self._logs: list[IO[bytes]] = []
        self._rank_of_pid: dict[int, int] = {}
        self._open_streams = 0
        self._status: int | None = None
        self._failed = 0
        self._schedule: collections.deque[tuple[float, int]] = collections.deque()
        self._counts = None if job.steps is None else StepCounts(job.steps)
        self._faults: FaultInjector | None = None
        if job.faults:
            self._faults = FaultInjector(
                job,
                hosts,
                home,
                pid_of_rank=self._pid_of_rank,
                restart=self._restart,
                say=lambda text: reports.send(say=text),
            )

    def run(self) -> None:
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_child)
        self._selector.register(_CONTROL_FD, selectors.EVENT_READ, self._on_control)
        # Hosts share the cores: a message that arrives at one of them must not wait
        # until another has computed for a whole slice of some milliseconds.
        with contextlib.suppress(OSError):
            syscalls.set_time_slice_s(_TIME_SLICE_S)
        try:
            self._start_ranks()
        except OSError as error:
            self._kill_all()
            self._reports.send(
                error=f"{self._job.command[0]!r} cannot be started: {error.strerror}"
            )
            return
        deadline_s = None
        if self._job.timeout_s is not None:
            deadline_s = time.monotonic() + self._job.timeout_s
        while self._rank_of_pid:
            self._handle(self._wait_s(deadline_s))
            now_s = time.monotonic()
            if deadline_s is not None and now_s >= deadline_s:
                deadline_s = None
                self._on_timeout()
            while self._schedule and now_s >= self._schedule[0][0]:
                self._signal_ranks(self._schedule.popleft()[1])
            if self._faults is not None and not self._schedule:
                self._faults.turn(self._step())
        # Processes that the ranks left behind may keep rank 0's pipe open.
        self._kill_all()
        drained_s = time.monotonic() + 1.0
        while self._open_streams and time.monotonic() < drained_s:
            self._handle(0.1)
        self._reports.send(status=self._status or self._failed)

    def _start_ranks(self) -> None:
        mode = Mode(self._job.mode)
        for rank in range(self._spec.num_ranks):
            self._logs.append(self._open_log(rank))
            self._start_rank(rank, mode)

    def _start_rank(self, rank: int, mode: Mode) -> None:
        env = self._job.env | rank_environment(
            self._spec, rank, mode=mode, master_port=self._job.master_port
        )
        log = self._logs[rank]
        if self._home is None:
            process = self._start(rank, env, log, syscalls.die_with_parent)
        else:
            host = self._hosts[rank // self._spec.ranks_per_host]
            with host.entered(self._home):
                process = self._start(rank, env, log, None)
        self._rank_of_pid[process.pid] = rank
        # Reaped in _on_child with all other children of process 1.
        process.returncode = 0
        for stream, fd in ((process.stdout, 1), (process.stderr, 2)):
            if stream is not None:
                self._forward(stream, fd, log)

    def _restart(self, host: int) -> None:
        """Start a host's ranks again, where they have ended."""
        each = self._spec.ranks_per_host
        for rank in range(host * each, (host + 1) * each):
            if self._pid_of_rank(rank) is None:
                self._start_rank(rank, Mode(self._job.mode))

    def _pid_of_rank(self, rank: int) -> int | None:
        return next((p for p, r in self._rank_of_pid.items() if r == rank), None)

    def _step(self) -> int:
        """Return the largest number of steps that a rank has ended."""
        counts = self._counts
        if counts is None:
            return 0
        return max(counts.read(rank).steps for rank in range(counts.ranks))

    def _start(
        self,
        rank: int,
        env: dict[str, str],
        log: IO[bytes],
        before_exec: Callable[[], None] | None,
    ) -> subprocess.Popen[bytes]:
        output = subprocess.PIPE if rank == 0 else log
        return subprocess.Popen(
            self._job.command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A separate process group, but the supervisor's session: the scheduler
            # groups tasks by session (sched_autogroup). In separate sessions a
            # communication thread that wakes up would wait behind the computation of
            # the other ranks, which on separate hosts would not exist (measured: an
            # all-reduce of 512 KiB beside computation takes 29 ms in one session, 288
            # ms in four).
            process_group=0,
            preexec_fn=before_exec,
        )

    def _open_log(self, rank: int) -> IO[bytes]:
        if self._job.logs is None:
            # It never has a name, so there is nothing to remove.
            return tempfile.TemporaryFile(buffering=0)
        path = Path(self._job.logs, f"rank{rank}.log")
        path.unlink(missing_ok=True)
        return path.open("ab+", buffering=0)

    def _forward(self, stream: IO[bytes], fd: int, log: IO[bytes]) -> None:
        self._open_streams += 1
        source = stream.fileno()
        os.set_blocking(source, False)

        def pass_on() -> None:
            try:
                piece = os.read(source, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not piece:
                self._selector.unregister(source)
                stream.close()
                self._open_streams -= 1
                return
            log.write(piece)
            try:
                while piece:
                    piece = piece[os.write(fd, piece) :]
            except BrokenPipeError:
                # As a shell reports `train.py | head`.
                self._stop_with(128 + signal.SIGPIPE, signal.SIGTERM)

        self._selector.register(source, selectors.EVENT_READ, pass_on)

    def _wait_s(self, deadline_s: float | None) -> float | None:
        moments = [] if deadline_s is None else [deadline_s]
        if self._schedule:
            moments.append(self._schedule[0][0])
        if self._faults is not None and not self._faults.is_idle:
            moments.append(time.monotonic() + _FAULTS_EVERY_S)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _handle(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _on_control(self) -> None:
        words = os.read(_CONTROL_FD, _CHUNK_BYTES).split()
        if not words:
            # `stretto` has exited: no process waits for a graceful end.
            self._kill_all()
            os._exit(0)
        number = signal.SIGINT if b"INT" in words else signal.SIGTERM
        self._stop_with(128 + number, number)

    def _on_timeout(self) -> None:
        ranks = sorted(self._rank_of_pid.values())
        self._reports.send(
            say=f"the time limit of {self._job.timeout_s:g} s is exceeded; stopping "
            f"rank {', '.join(map(str, ranks))}"
        )
        self._stop_with(TIMEOUT_STATUS, signal.SIGTERM)

    def _on_child(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, _CHUNK_BYTES)
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._rank_of_pid.pop(pid, None)
            if rank is not None:
                self._on_rank_end(rank, os.waitstatus_to_exitcode(wait_status))

    def _on_rank_end(self, rank: int, code: int) -> None:
        if self._faults is not None:
            code = self._status_after_faults(rank, code)
        if code == 0 or self._status is not None:
            return
        self._status = code if code > 0 else 128 - code
        how = (
            f"failed with exit status {code}"
            if code > 0
            else f"was killed by {signal.Signals(-code).name}"
        )
        host = host_name(rank // self._spec.ranks_per_host)
        self._reports.send(say=f"rank {rank} on {host} {how}{self._tail(rank)}")
        self._signal_in(self._job.grace_s, signal.SIGTERM)

    def _status_after_faults(self, rank: int, code: int) -> int:
        """Return a rank's status, unless a fault has hit it; end what is left then."""
        hit = self._faults.hit if self._faults is not None else set()
        if set(self._rank_of_pid.values()) <= hit and self._rank_of_pid:
            self._signal_in(self._job.grace_s, signal.SIGTERM)
        if code and rank not in hit:
            self._reports.send(say=f"rank {rank} failed with status {code}")
            self._failed = self._failed or (code if code > 0 else 128 - code)
        return 0

    def _tail(self, rank: int) -> str:
        """Return the last lines that ``rank`` wrote, unless they were already shown."""
        kept = "" if self._job.logs is None else f" ({self._job.logs}/rank{rank}.log)"
        if rank == 0:
            return f"; see its output above{kept}"
        log = self._logs[rank]
        size_bytes = log.seek(0, os.SEEK_END)
        log.seek(max(0, size_bytes - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        if not lines:
            return f"; it wrote nothing{kept}"
        return "\n".join(
            [f"; its last lines{kept}:", *(f"  | {line}" for line in lines)]
        )

    def _stop_with(self, status: int, number: int) -> None:
        """Stop the ranks; the first cause is the outcome, later ones are not."""
        if self._status is None:
            self._status = status
        self._signal_in(0.0, number)

    def _signal_in(self, delay_s: float, number: int) -> None:
        """Signal the ranks after a while, then again with stronger signals."""
        moment_s = time.monotonic() + delay_s
        steps = [(moment_s, number)]
        if number == signal.SIGINT:
            moment_s += _INTERRUPT_GRACE_S
            steps.append((moment_s, signal.SIGTERM))
        steps.append((moment_s + _KILL_AFTER_S, signal.SIGKILL))
        self._schedule = collections.deque(steps)

    def _signal_ranks(self, number: int) -> None:
        for pid in self._rank_of_pid:
            # A rank leads its own group, so the signal reaches its children, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _kill_all(self) -> None:
        """Kill every process of the lab except this one."""
        if self._home is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        # Orphans are adopted one generation at a time.
        for _ in range(100):
            children = children_of(os.getpid())
            if not children:
                return
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _wake_on_child() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake_read


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
