"""One rank's process, and its log."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from pathlib import Path
from typing import IO, TYPE_CHECKING, final

from stretto.cluster import processes
from stretto.lab import syscalls

if TYPE_CHECKING:
    from stretto.cluster.part_spec import RankCommand

_TAIL_BYTES = 4096
_TAIL_LINES = 20
_UMASK = 0o022


@final
class RankProcess:
    """A rank, which ends with this process however that ends."""

    def __init__(self, command: RankCommand, logs: str) -> None:
        self.number, self.device = command.rank, command.device
        self.code: int | None = None
        """Its exit status as of `subprocess`; ``None`` while it runs."""

        self.leaves = False
        """Its device is taken away, so its end does not count as a failure."""

        self._command = command
        self._log_path = Path(logs, command.log)
        self._log: IO[bytes] | None = None
        self._lost_bytes = 0
        self._tail = b""
        self._own_session = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, directory: str, *, own_session: bool) -> IO[bytes]:
        """Start the process and return its output.

        Args:
            directory: in which it runs.
            own_session: give it a session. Ranks of a foreground share one, because
                the scheduler divides processors by session. A background lowers its
                session's priority, so each of its ranks has its own.

        Raises:
            OSError: it does not start; ``strerror`` names what is missing.
        """
        with contextlib.suppress(OSError):
            self._log = self._log_path.open("ab", buffering=0)
        words = self._command.command
        self._own_session = own_session
        try:
            self._process = subprocess.Popen(
                words,
                cwd=directory,
                env=self._command.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
                process_group=None if own_session else 0,
                preexec_fn=functools.partial(_before_exec, os.getpid()),
            )
        except OSError as error:
            what = f"{error.filename or words[0]}: {error.strerror}"
            raise OSError(error.errno, what) from error
        if self._process.stdout is None:
            raise AssertionError("a rank has no output")
        return self._process.stdout

    @property
    def runs(self) -> bool:
        """Whether it has started and not ended."""
        return self._process is not None and self.code is None

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` before it starts."""
        return None if self._process is None else self._process.pid

    def ended(self, wait_status: int) -> None:
        """Record that it was waited for."""
        self.code = os.waitstatus_to_exitcode(wait_status)
        if self._process is not None:
            self._process.returncode = self.code

    def signal(self, number: int) -> None:
        """Signal the rank alone: its data loaders live while it saves its work."""
        if self._process is not None and self.code is None:
            if self._own_session:
                processes.raise_priority(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def write(self, piece: bytes) -> None:
        """Append output to the log; a full disk loses lines, never the job."""
        self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        if self._log is not None:
            with contextlib.suppress(OSError):
                if self._lost_bytes:
                    lost = f"\n[{self._lost_bytes} bytes could not be written]\n"
                    self._log.write(lost.encode())
                    self._lost_bytes = 0
                piece = piece[self._log.write(piece) :]
        self._lost_bytes += len(piece)

    def failure(self) -> str:
        """Return how it failed, and its last lines."""
        code = self.code or 0
        how = (
            f"failed with exit status {code}"
            if code > 0
            else f"was killed by {_signal_name(-code)}"
        )
        lines = _printable(self._tail).splitlines()[-_TAIL_LINES:]
        wrote = "; it wrote nothing"
        if lines:
            wrote = "; its last lines:" + "".join(f"\n  | {line}" for line in lines)
        return f"rank {self.number} {how}{wrote}"


def _printable(text: bytes) -> str:
    """Return output without what would control the terminal of who reads it."""
    found = text.decode(errors="replace")
    return "".join(
        c if c.isprintable() or c in "\t\n\r" else "\N{REPLACEMENT CHARACTER}"
        for c in found
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _before_exec(parent: int) -> None:
    syscalls.die_with(parent)
    os.umask(_UMASK)
