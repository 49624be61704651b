"""Local clusters of tests: small, with short times, and gone at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto import variable_names
from stretto.cluster import engine_local, engine_ray, processes, roles
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.part_spec import PartSpec
from stretto.schema import codec
from stretto.schema.job import BackgroundRules, GpuRange, Job, RestartRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0
"""How long tests wait for what must happen at some time."""

LOCAL, RAY = "local", "ray"
ENGINES = [
    LOCAL,
    pytest.param(
        RAY,
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(300),
            pytest.mark.skipif(not find_spec("ray"), reason="needs Ray"),
        ],
    ),
]
"""Parameters of tests that hold for every engine."""

ENDS = ("done", "failed", "stopped")


class Cluster:
    """A cluster on this machine."""

    def __init__(
        self, root: Path, settings: Settings, engine: str, interface: str
    ) -> None:
        self.folders, self.settings = Folders(root), settings
        self.engine, self._interface = engine, interface
        self.start()

    def node(self, host: str) -> Folders:
        """Return the folders of a host."""
        return self.folders if self.engine == LOCAL else self.folders.of_node(host)

    def start(self) -> None:
        if self.engine == RAY:
            ray = engine_ray.started_ray(self.folders, self._interface)
            self.settings = dataclasses.replace(self.settings, ray=ray)
        engine_local.start(self.folders, self.settings)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        return engine_local.ask(self.folders, {"do": do, **fields}, patience_s=LIMIT_S)

    def submit(self, job: Job) -> str:
        text = codec.encode(job).decode()
        found: str = self.ask("submit", spec=text, user="test")["job"]
        return found

    def show(self, job: str) -> dict[str, Any]:
        return self.ask("show", job=job)

    def events(self, job: str) -> list[str]:
        """Return the kinds of a job's events."""
        return [row["kind"] for row in self.rows(job)]

    def rows(self, job: str | None) -> list[dict[str, Any]]:
        """Return a job's events, or the first events of all."""
        found: list[dict[str, Any]] = self.ask("events", since=0, job=job)["events"]
        return found

    def supervisor(self, job: str) -> int:
        """Return the process of the supervisor that a job's last attempt has."""
        self.await_state(job, "running")
        pids = [r["data"]["pid"] for r in self.rows(job) if r["kind"] == "started"]
        return int(pids[-1])

    def await_state(self, job: str, *states: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def has_state() -> bool:
            nonlocal found
            found = self.show(job)
            assert found["state"] in states or found["state"] not in ENDS, found
            return found["state"] in states

        await_that(has_state, lambda: f"{job} is not {states}: {found}")
        return found

    def pid(self, role: str) -> int:
        """Return the process of a role, or of the agent of a host."""
        lock = self._locks().get(role) or self.node(role).agent_lock(role)
        found: int | None = None

        def runs() -> bool:
            nonlocal found
            found = roles.holder_of(lock)
            return found is not None

        await_that(runs, lambda: f"{role} does not run")
        assert found is not None
        return found

    def _locks(self) -> dict[str, Path]:
        return {
            "keeper": self.folders.keeper_lock,
            "coordinator": self.folders.coordinator_lock,
            "gateway": self.folders.gateway_lock,
            "ray": self.folders.ray_lock,
        }

    def kill(self, role: str) -> int:
        """Kill a process of the cluster at once; return its number."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def silenced(self, host: str) -> Iterator[None]:
        """Keep a host silent: its agent is killed, and no other one can start."""
        lock = self.node(host).agent_lock(host)
        held: int | None = None

        def is_held() -> bool:
            nonlocal held
            if (pid := roles.holder_of(lock)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            held = processes.lock(lock, patience_s=0.05)
            return held is not None

        await_that(is_held, lambda: f"the agent of {host} runs")
        assert held is not None
        try:
            yield
        finally:
            os.close(held)

    def log(self, job: str, rank: int = 0, attempt: int = 1) -> str:
        return (self.folders.logs(job, attempt) / f"rank{rank}.log").read_text()

    def end(self) -> None:
        """End everything at once."""
        self.folders.mark_down()
        hosts = self.folders.hosts(self.settings)
        self._kill_holders([*self._locks().values()])  # no actor is left, either
        for host in hosts:
            if self.node(host).root.is_dir():
                self.node(host).mark_down()  # an agent may be about to start
        self._kill_holders([self.node(host).agent_lock(host) for host in hosts])
        if self.settings.ray is not None:
            shutil.rmtree(Path(self.settings.ray.temp).parent, ignore_errors=True)
        for host in hosts:
            for folder in self.node(host).attempts(host).glob("*"):
                processes.kill_marked(variable_names.CLUSTER_ATTEMPT, str(folder))

    def _kill_holders(self, locks: list[Path]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while any(map(processes.is_locked, locks)) and time.monotonic() < deadline_s:
            for lock in locks:
                if (pid := roles.holder_of(lock)) is not None:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            processes.kill_marked(variable_names.CLUSTER_RAY, str(self.folders.root))
            time.sleep(0.02)
        processes.kill_marked(variable_names.CLUSTER_RAY, str(self.folders.root))


def await_that(
    holds: Callable[[], bool], explain: Callable[[], str], *, limit_s: float = LIMIT_S
) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.01)


def await_file(path: Path) -> None:
    await_that(path.exists, lambda: f"{path} does not appear")


def job(
    folder: Path,
    script: str,
    *,
    devices: int | tuple[int, int] = 1,
    grace_s: float = LIMIT_S,
    attempts: int = 3,
    **fields: Any,
) -> Job:
    """Return a job that runs a shell script in a folder on each of its devices."""
    minimum, maximum = devices if isinstance(devices, tuple) else (devices, devices)
    rules = RestartRules(attempts=attempts, backoff_s=0.1, grace_s=grace_s)
    usual: dict[str, Any] = {
        "name": "test",
        "role": "foreground",
        "command": ("/bin/sh", "-c", script),
        "launch": "direct",
        "directory": str(folder),
        "gpus": GpuRange(minimum=minimum, maximum=maximum),
        "restart": rules,
        "background": BackgroundRules(allow=True),
    }
    return Job(**usual | fields)


WAITS = "while [ ! -e go ]; do sleep 0.02; done"
"""A script that waits for a file."""


def part_spec_of(folder: Path, *command: str, **fields: Any) -> PartSpec:
    """Return a host's part of an attempt that runs a command in a folder."""
    devices = fields.pop("devices", ("cpu:0",))
    base = PartSpec(
        job="j1",
        attempt=1,
        role="foreground",
        launch="direct",
        command=command,
        directory=str(folder),
        environment={},
        devices=devices,
        first_rank=0,
        world_size=len(devices),
        master_address="127.0.0.1",
        master_port=29500,
        files=str(folder / "files"),
        logs=str(folder / "logs"),
        boards=str(folder / "boards"),
        peers_grace_s=0.1,
    )
    return dataclasses.replace(base, **fields)


@contextlib.contextmanager
def cluster(
    root: Path,
    *,
    engine: str = LOCAL,
    interface: str = "127.0.0.1",
    hosts: int = 2,
    devices: int = 2,
    watchdog_s: float = 60.0,
    heartbeat_s: float = 1.0,
    **settings: Any,
) -> Iterator[Cluster]:
    """Yield a cluster of some hosts with some devices each."""
    names = {
        f"host{number}": tuple(
            f"cpu:{number * devices + index}" for index in range(devices)
        )
        for number in range(hosts)
    }
    found = Cluster(
        root,
        Settings(
            hosts=names,
            policy=settings.pop("policy", "fifo"),
            watchdog_s=watchdog_s,
            heartbeat_s=heartbeat_s,
            **settings,
        ),
        engine,
        interface,
    )
    try:
        yield found
    finally:
        found.end()
