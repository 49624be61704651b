"""Starts Gloo ranks as processes on loopback and gathers what they return.

A test passes a function of its own module; every rank loads that file again, joins a
process group and calls it. Ranks are forked from servers that have imported torch
(`rank_process.py`). Timeouts count from when all ranks have started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "rank_process.py"
"""Runs one rank, or serves as a fork server for one."""

START_S = 300.0
"""Ranks have all started within this, however busy the machine is."""

BUSY = 2.0
"""A test's own timeouts are for a quiet machine; they only bound hangs."""


@dataclass
class RankError:
    """The exception a rank ended with."""

    kind: str
    message: str
    traceback: str


class Forked:
    """A process forked by a `RankServer`, like a `subprocess.Popen`."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        with self._server.changed:
            if not self._server.changed.wait_for(
                lambda: self.poll() is not None, timeout
            ):
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class RankServer:
    """Forks one rank's processes (`rank_process.serve`)."""

    def __init__(self) -> None:
        self.environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
        self.changed = threading.Condition()
        self._running: dict[int, Forked] = {}
        """By process id, which the system uses again once a process has ended."""
        self._started: list[Forked] = []
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "serve"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, run: list[str], environment: dict[str, str], log: Path) -> Forked:
        """Fork a process that calls ``rank_process.run(*run)`` and writes to `log`."""
        assert self._process.stdin is not None
        with self.changed:
            before = len(self._started)
            request = {"run": run, "environment": environment, "log": str(log)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if not self.changed.wait_for(lambda: len(self._started) > before, START_S):
                raise RuntimeError("the server of ranks did not answer")
            return self._started[-1]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, *numbers = line.split()
            with self.changed:
                pid = int(numbers[0]) if numbers else 0
                if what == "started":
                    self._running[pid] = Forked(self, pid)
                    self._started.append(self._running[pid])
                elif what == "ended":
                    self._running.pop(pid).status = int(numbers[1])
                self.changed.notify_all()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


_READ_AT_IMPORT = ("TORCH", "PYTORCH", "OMP_", "PYTHON", "LD_", "MALLOC_")
"""Variables with these beginnings are read when a process or torch starts."""


class RankServers:
    """One server per rank, each started when first needed."""

    def __init__(self) -> None:
        self._servers: list[RankServer] = []

    def start(
        self, rank: int, run: list[str], environment: dict[str, str], log: Path
    ) -> Forked | subprocess.Popen[bytes]:
        while len(self._servers) <= rank:
            self._servers.append(RankServer())
        server = self._servers[rank]
        keys = {*environment, *server.environment}
        if any(
            key.startswith(_READ_AT_IMPORT)
            and environment.get(key) != server.environment.get(key)
            for key in keys
        ):
            with log.open("wb") as file:
                return subprocess.Popen(
                    [sys.executable, str(PROGRAM), *run],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        return server.start(run, environment, log)

    def close(self) -> None:
        for server in self._servers:
            server.close()


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables from which a rank joins its group."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def call_of(
    function: Callable[..., Any], arguments: tuple[Any, ...], out: Path, group_s: float
) -> list[str]:
    """The arguments of ``rank_process.run`` that call a function of a test module."""
    return [
        function.__code__.co_filename,
        function.__name__,
        str(out),
        pickle.dumps(arguments).hex(),
        str(group_s),
    ]


def wait_or_kill(processes: list[Any], timeout_s: float) -> list[int]:
    """Wait for all; kill those that run on. Returns the ranks of these."""
    deadline = time.perf_counter() + timeout_s
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.perf_counter()))
    finally:
        late = [r for r, p in enumerate(processes) if p.poll() is None]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return late


def text_of(logs: list[Path]) -> str:
    """The ends of the ranks' logs."""
    return "\n".join(
        f"--- rank {rank}\n{log.read_text(errors='replace')[-3000:]}"
        for rank, log in enumerate(logs)
    )


class Ranks:
    """Runs a function on several ranks."""

    def __init__(self, folder: Path, servers: RankServers) -> None:
        self._folder = folder
        self._servers = servers
        self._runs = 0

    def __call__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        timeout_s: float = 60.0,
        group_s: float = 30.0,
        errors: bool = False,
    ) -> list[Any]:
        """What every rank returned, by rank.

        With ``errors`` a rank's exception is a `RankError` in the list, and a rank
        that left nothing is ``None``; without, either fails the test.
        """
        self._runs += 1
        outs = [self._folder / f"{self._runs}-{rank}" for rank in range(size)]
        logs = [out.with_suffix(".log") for out in outs]
        port = free_port()
        processes: list[Any] = []
        for rank in range(size):
            environment = rank_environment(rank, size, port)
            run = call_of(function, arguments, outs[rank], group_s)
            processes.append(self._servers.start(rank, run, environment, logs[rank]))
        try:
            _wait_until_ready(processes, outs)
        except BaseException:
            wait_or_kill(processes, 0.0)
            raise
        late = wait_or_kill(processes, BUSY * timeout_s)
        text = text_of(logs)
        if late:
            pytest.fail(f"ranks {late} did not end within {timeout_s} s\n{text}")
        return [result_of(out, rank, text, errors) for rank, out in enumerate(outs)]


def _wait_until_ready(processes: list[Any], outs: list[Path]) -> None:
    deadline = time.perf_counter() + START_S
    while not all(out.with_suffix(".ready").exists() for out in outs):
        if any(p.poll() is not None for p in processes):
            return  # what ended it is in its log
        if time.perf_counter() > deadline:
            return
        time.sleep(0.02)


def result_of(out: Path, rank: int, text: str, errors: bool = False) -> Any:
    """What a rank left in `out`; its exception fails the test unless `errors`."""
    if not out.exists():
        if errors:
            return None
        pytest.fail(f"rank {rank} left no result\n{text}")
    kind, value = pickle.loads(out.read_bytes())
    if kind == "value":
        return value
    if errors:
        return RankError(*value)
    pytest.fail(f"rank {rank} raised\n{value[2]}\n{text}")
