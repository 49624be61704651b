"""A cluster of processes on this machine: start it, keep it running, end it.

A keeper starts the coordinator and one agent per emulated host, or what connects it to
Ray, and starts again what has ended (`roles`). The coordinator starts a keeper if none
runs; agents and commands do so when they find no coordinator. So any of them may be
killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import channel, processes, store_release
from stretto.cluster.attempt_ends import end_attempts
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.loop import Loop, now_s
from stretto.cluster.part_spec import END_FILE, LOCK_FILE
from stretto.cluster.roles import (
    Role,
    StoppedHolders,
    continue_process,
    continue_stopped,
    end_holders,
    kill,
    send,
)
from stretto.cluster.store import DATABASE
from stretto.errors import ClusterError, Infeasible, SpecError, StrettoError
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = get_logger(__name__)

COORDINATOR_ENDS = ": the coordinator ends: "
"""In the line with which a coordinator says why it cannot run."""

_SERVER, _AGENT = "stretto.cluster.server", "stretto.cluster.agent"
_KEEPER, _RAY_HEAD = "stretto.cluster.engine_local", "stretto.cluster.ray_head"
GATEWAY = "stretto.cluster.ray_gateway"

_MODULES = _KEEPER, _SERVER, _AGENT, GATEWAY, _RAY_HEAD
"""The modules of the processes that serve a cluster on this host."""

_MAYBE_DONE = {
    "submit": "; it may have the job already, see `stretto cluster list` before you "
    "submit it again"
}
"""Hints for a request that may have come through, by the request."""

_CLEAN_LOOKS = 3
"""Looks, one after the other, that must find nothing."""

_LOOK_S = 0.1
_ANSWER_S = 10.0
_KEEPER_S = 2.0
_STOPPED_LOOK_S = 0.5
_START_S = 90.0
_ACTORS_S = 30.0
"""Until the actors on a Ray have ended; connecting takes 3 s."""

_QUIET_S = 2.0
"""`down` says what it waits for after this time."""

_RAY_START_S = 180.0
"""Ray's processes take 5 s to start, and much longer on a busy machine."""


@final
class ClusterKeeper:
    """Keeps a cluster's processes running."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        settings = folders.load_settings()
        self._stages = stages(folders, settings)
        # On Ray, actors look after the hosts.
        self._hosts = [] if settings.ray is not None else list(settings.hosts)
        self._stopped = StoppedHolders(self._locks, itertools.chain(*self._stages))
        self._said: set[str] = set()
        self._loop = Loop()

    def run(self) -> None:
        """Keep them running; end them once the cluster is to be down.

        A signal ends this process alone: the coordinator starts another one.
        """
        ends = self._loop.stop
        self._loop.on_signals(
            {
                signal.SIGCHLD: self._look,
                signal.SIGTERM: ends,
                signal.SIGINT: ends,
                signal.SIGHUP: lambda: None,
            }
        )
        self._look()
        self._loop.every(_LOOK_S, self._look)
        self._loop.every(_STOPPED_LOOK_S, self._stopped.look)
        self._loop.run()
        if not self._is_over():
            return
        for stage in self._stages:
            end_holders([role.lock for role in stage], timeout_s=_ANSWER_S)

    def _locks(self) -> list[Path]:
        """Return the locks of all processes of the cluster that this one looks after.

        A supervisor that is stopped as its agent is would end its ranks too late.
        """
        hosts = [host_locks(self._folders, host) for host in self._hosts]
        return served_locks(self._folders) + list(itertools.chain(*hosts))

    def _look(self) -> None:
        if self._is_over() or not self._folders.keeper_lock.exists():
            self._loop.stop()  # without its lock, another keeper runs beside this one
            return
        for role in itertools.chain(*self._stages):
            # A disk may be full, or processes may be scarce: try again later.
            try:
                self._make_folders()
                role.look()
            except OSError as error:
                self._say(f"{role.lock} cannot be used: {error.strerror}")

    def _make_folders(self) -> None:
        """Make the agents' folders again if a cleanup has removed them."""
        if self._hosts:
            self._folders.hosts_folder.mkdir(mode=0o700, exist_ok=True)
        for host in self._hosts:
            self._folders.host(host).mkdir(mode=0o700, exist_ok=True)

    def _say(self, text: str) -> None:
        """Write into the log what is new."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)

    def _is_over(self) -> bool:
        return self._folders.down.exists() or not self._folders.root.exists()


def stages(folders: Folders, settings: Settings) -> list[list[Role]]:
    """Return the processes of a cluster on this host, in the order of their end."""
    root, ray = str(folders.root), settings.ray
    coordinator = Role(
        _SERVER,
        [root],
        folders.coordinator_lock,
        folders.coordinator_log,
    )
    if ray is None:
        return [[coordinator, *_agents(folders, settings)]]
    gateway = Role(
        GATEWAY,
        [root],
        folders.gateway_lock,
        folders.gateway_log,
    )
    head = Role(_RAY_HEAD, [root], folders.ray_lock, folders.ray_log)
    # The gateway ends what runs on other hosts, through Ray.
    return [[gateway], [coordinator, head] if ray.is_started else [coordinator]]


def _agents(folders: Folders, settings: Settings) -> Iterator[Role]:
    for host in settings.hosts:
        folders.host(host).mkdir(mode=0o700, parents=True, exist_ok=True)
        yield Role(
            _AGENT,
            [str(folders.root), host],
            folders.agent_lock(host),
            folders.host(host) / "agent.log",
        )


def served_locks(folders: Folders) -> list[Path]:
    """Return the locks of the processes that the whole cluster depends on."""
    return [
        folders.keeper_lock,
        folders.coordinator_lock,
        folders.gateway_lock,
        folders.ray_lock,
    ]


def host_locks(folders: Folders, host: str) -> list[Path]:
    """Return the locks of a host's agent and supervisors."""
    attempts = folders.attempts(host).glob(f"*/{LOCK_FILE}")
    return [folders.agent_lock(host), *attempts]


def start_keeper(folders: Folders) -> None:
    """Start a keeper unless one runs, or the cluster is to be down."""
    if folders.down.exists() or processes.is_locked(folders.keeper_lock):
        return
    settings = folders.find_settings()  # no keeper could read them, either
    if settings is None or not settings.has_keeper:
        return
    processes.start_detached(
        [*processes.PYTHON, "-m", _KEEPER, str(folders.root)], folders.keeper_log
    )


# for the command line


def _start_keeper(folders: Folders) -> None:
    """Do as `start_keeper`.

    Raises:
        ClusterError: it cannot be started.
    """
    try:
        start_keeper(folders)
    except OSError as exc:
        raise ClusterError(
            f"the cluster in {folders.root} does not run, and cannot be started again: "
            f"{folders.keeper_log}: {exc.strerror}"
        ) from exc


def start(folders: Folders, settings: Settings) -> dict[str, Any]:
    """Start a cluster and return its status once all hosts have joined.

    Raises:
        ClusterError: it runs already, or does not start.
    """
    folders.create()
    with _locked(folders.starting) as has_lock:
        if not has_lock:
            raise ClusterError(
                f"another command starts a cluster in {folders.root}: see `stretto "
                "cluster status`, or start another with --folder"
            )
        return _start(folders, settings)


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold a file's lock; yield whether others do not have it.

    The kernel releases it however this process ends.
    """
    try:
        descriptor = processes.lock(path, shared=shared)
    except OSError:  # no file can be created on a full disk
        yield True
        return
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _start(folders: Folders, settings: Settings) -> dict[str, Any]:
    if _is_served(folders):
        raise ClusterError(
            f"a cluster runs in {folders.root}: see `stretto cluster status`, end it "
            "with `stretto cluster down`, or start another with --folder"
        )
    _refuse_strangers(folders, settings)
    store_release.check_unopened(folders.root / DATABASE)
    folders.save_settings(settings)
    with contextlib.suppress(OSError):
        folders.ending.touch(mode=0o600)  # now: later the disk may be full
    folders.found_hosts.unlink(missing_ok=True)
    folders.down.unlink(missing_ok=True)
    folders.actors_ended.unlink(missing_ok=True)
    log_bytes = _size(folders.coordinator_log)
    _start_keeper(folders)
    limit_s = _START_S if settings.ray is None else _RAY_START_S
    deadline_s = now_s() + limit_s
    found: dict[str, Any] = {}
    while now_s() < deadline_s:
        with contextlib.suppress(ClusterError):
            found = ask(folders, {"do": "status"}, patience_s=1.0)
            if found["hosts"] and all(row["joined"] for row in found["hosts"]):
                break
        if why := _refused(folders, log_bytes):
            folders.mark_down()  # it would be started again and again
            raise ClusterError(why)
        time.sleep(0.02)
    else:
        logs = [folders.coordinator_log]
        logs += [] if settings.ray is None else [folders.gateway_log, folders.ray_log]
        raise ClusterError(
            f"the cluster in {folders.root} did not start within {limit_s:g} s"
            f"{_missing(found, settings)}: see {', '.join(map(str, logs))}, and end it "
            "with `stretto cluster down`"
        )
    return ask(folders, {"do": "status"})


def _missing(status: dict[str, Any], settings: Settings) -> str:
    """Return which hosts have not joined, and why that may be."""
    rows = [row for row in status.get("hosts", ()) if not row["joined"]]
    if not rows:
        return ""
    text = f", {', '.join(row['host'] for row in rows)} did not join"
    names = [device["name"] for row in rows for device in row["devices"]]
    ray = settings.ray
    if ray is not None and not ray.is_started and any("cuda" in n for n in names):
        text += ", and other work of Ray may have its GPUs"
    return text


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _refused(folders: Folders, log_bytes: int) -> str:
    """Return why the coordinator has ended since its log had a size, or empty."""
    try:
        with folders.coordinator_log.open("rb") as file:
            file.seek(log_bytes)
            lines = file.read(1 << 16).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if COORDINATOR_ENDS in line), "")


def _refuse_strangers(folders: Folders, settings: Settings) -> None:
    """Refuse to start while jobs run that the cluster's agents would not find."""
    found = folders.root.glob(f"nodes/*/hosts/*/attempts/*/{LOCK_FILE}")
    if settings.ray is not None:
        found = folders.root.glob(f"hosts/*/attempts/*/{LOCK_FILE}")
    for lock in found:
        if processes.is_locked(lock):
            raise ClusterError(
                f"attempt {lock.parent.name} is still running. It was started when "
                f"{folders.root} was a cluster {'without' if settings.ray else 'on'} "
                "Ray, so this cluster would not find it: wait until its watchdog has "
                "ended it"
            )


def ask(
    folders: Folders, message: dict[str, Any], *, patience_s: float = _ANSWER_S
) -> dict[str, Any]:
    """Return the coordinator's answer; wait a while for one that starts again.

    Raises:
        ClusterError: no cluster runs here, or it does not answer.
        StrettoError: the coordinator refused the request.
    """
    if message["do"] == "submit":
        # If the answer is lost, the same request again makes no second job.
        message = {"request": uuid.uuid4().hex} | message
    deadline_s = now_s() + patience_s
    keeper_s = now_s()
    while True:
        try:
            found = channel.request(folders.socket, message, timeout_s=_ANSWER_S)
            break
        except OSError as error:
            if not folders.settings.exists() or folders.down.exists():
                raise ClusterError(
                    f"no cluster runs in {folders.root}: run `stretto cluster start`"
                ) from error
            if continue_stopped(served_locks(folders)):
                deadline_s = now_s() + patience_s
            folders.load_settings()  # nothing could start the coordinator without
            if now_s() > deadline_s:
                raise ClusterError(
                    f"the coordinator of {folders.root} does not answer "
                    f"({error.strerror or 'it is too slow'}): see "
                    f"{folders.coordinator_log}{_MAYBE_DONE.get(message['do'], '')}"
                ) from error
            if now_s() >= keeper_s:  # one takes a moment to start and to be seen
                keeper_s = now_s() + _KEEPER_S
                _start_keeper(folders)
            time.sleep(0.05)
    if "error" in found:
        raise _refusal(str(found["error"]), int(found.get("exit", 1)))
    answer: dict[str, Any] = _answer(found, str(message["do"]))
    return answer


class _Answer(dict[str, Any]):
    """A part of an answer, which says so if a field is missing."""

    def __init__(self, fields: dict[str, Any], request: str) -> None:
        super().__init__(fields)
        self._request = request

    def __missing__(self, key: str) -> Any:
        raise ClusterError(
            f"the coordinator's answer to {self._request!r} has no {key!r}: it is of "
            "an earlier release than this command. Start the cluster again: `stretto "
            "cluster down`, then `stretto cluster start`"
        )


def _answer(value: Any, request: str) -> Any:
    if isinstance(value, dict):
        found = {key: _answer(each, request) for key, each in value.items()}
        return _Answer(found, request)
    return [_answer(e, request) for e in value] if isinstance(value, list) else value


def _refusal(text: str, exit_code: int) -> StrettoError:
    kinds = {each.exit_code: each for each in (ClusterError, SpecError, Infeasible)}
    return kinds.get(exit_code, ClusterError)(text)


def down(
    folders: Folders,
    *,
    timeout_s: float,
    report: Callable[[str], None] = lambda _: None,
) -> bool:
    """End a cluster: its jobs stop with their grace, and wait for the next start.

    If this is interrupted or killed, the coordinator uses the hosts again.

    Args:
        folders: of the cluster.
        timeout_s: how long to wait for the jobs.
        report: called with what it waits for, if that takes long, and with what may
            be left.

    Returns:
        Whether all jobs had ended in time. Otherwise, and if the coordinator cannot
        start, their supervisors end them when their watchdog fires.

    Raises:
        ClusterError: no cluster runs here, or it has ended and that cannot be kept.
    """
    try:
        status = ask(folders, {"do": "status"})
    except ClusterError:
        damaged = folders.settings.exists() and folders.find_settings() is None
        if folders.down.exists() or not (damaged or _is_served(folders)):
            raise
        _end_processes(folders)
        _say_what_may_be_left(folders, report)
        return False
    # Without this lock, the coordinator uses drained hosts again.
    with _locked(folders.ending, shared=True):
        for row in status["hosts"]:
            host = row["host"]
            with contextlib.suppress(ClusterError):  # it cannot be kept, on a full disk
                ask(
                    folders, {"do": "drain", "host": host, "user": "down", "ends": True}
                )
        has_ended = _await_ends(folders, timeout_s, report)
        _end_processes(folders)
        _say_what_may_be_left(folders, report)
    return _await_attempts(folders) and has_ended


def _say_what_may_be_left(folders: Folders, report: Callable[[str], None]) -> None:
    """Say what may run on other hosts, and what ends it, if that is not known.

    Only settings say at which address a Ray is that the cluster has joined.
    """
    is_joined = folders.gateway_lock.exists() and not folders.ray_lock.exists()
    is_known = folders.actors_ended.exists() or folders.find_settings() is not None
    if is_joined and not is_known:
        report(
            "processes of the cluster may still run on other hosts of its Ray, because "
            f"{folders.settings} cannot be read: run `stretto cluster start` with the "
            "--ray HOST:PORT that the cluster had, then `stretto cluster down` again"
        )


def _await_ends(
    folders: Folders, timeout_s: float, report: Callable[[str], None]
) -> bool:
    """Wait for the ends of all attempts; return whether they came in time."""
    began_s = now_s()
    said = ""
    while True:
        try:
            status = ask(folders, {"do": "status"})
        except ClusterError:  # another `down` was faster, or nothing answers
            return folders.down.exists() and not _runs_any(folders)
        if not status["attempts"]:
            return True
        passed_s = now_s() - began_s
        if passed_s >= timeout_s:
            return False
        text = _waits_for(status, timeout_s)
        if text != said and (status["trouble"] or passed_s > _QUIET_S):
            said = text
            report(text)
        time.sleep(0.05)


def _await_attempts(folders: Folders) -> bool:
    """Wait until no attempt is left on this host, but not for long; return whether so.

    What a signal has stopped is continued: no watchdog would end it.
    """
    deadline_s = now_s() + _KEEPER_S
    while True:
        found = processes.lock_holders(folders.root, LOCK_FILE)
        for pid in itertools.chain(*found.values()):
            continue_process(pid)
        # A supervisor may stay until its watchdog fires, with the end in its file.
        if all((lock.parent / END_FILE).exists() for lock in found):
            return True
        if now_s() > deadline_s:
            return False
        time.sleep(0.05)


def _waits_for(status: dict[str, Any], timeout_s: float) -> str:
    jobs = ", ".join(sorted(job for job, _ in status["attempts"]))
    if status["trouble"]:
        return (
            f"cannot ask {jobs} to stop: {status['trouble']}. Waits at most "
            f"{timeout_s:g} s for space; then, or with --timeout 0, the cluster ends, "
            "and they end when their watchdog fires"
        )
    return f"waits at most {timeout_s:g} s for {jobs}"


def _runs_any(folders: Folders) -> bool:
    """Return whether an attempt may still run; on other hosts nothing is known."""
    settings = folders.find_settings()
    if settings is None or settings.ray is not None:
        return True
    locks = folders.root.glob(f"hosts/*/attempts/*/{LOCK_FILE}")
    return any(map(processes.is_locked, locks))


def _locks_by_stage(folders: Folders) -> list[list[Path]]:
    """Return the locks of all processes that may serve a cluster on this host.

    They are in the order of their end.
    """
    agents = folders.root.glob("hosts/*/agent.lock")
    return [
        [folders.gateway_lock],
        [folders.coordinator_lock, folders.ray_lock, *agents],
        [folders.keeper_lock],
    ]


def _is_served(folders: Folders) -> bool:
    """Return whether a process of the cluster runs on this host."""
    return any(map(processes.is_locked, itertools.chain(*_locks_by_stage(folders))))


def _end_processes(folders: Folders) -> None:
    """End a cluster's processes, whether or not its settings can be read.

    Raises:
        ClusterError: they have ended, and it cannot be kept that they are to.
    """
    try:
        folders.mark_down()
    except ClusterError as error:
        _end_serving(folders)
        lost = ", ".join(end_attempts(folders.root))
        raise ClusterError(
            f"{error}. All processes of the cluster on this host were ended"
            f"{lost and f', and how {lost} ended could not be kept'}. Once a file can "
            "be created, the next command starts the cluster again: run `stretto "
            "cluster down` again then"
        ) from error
    *others, keeper = _locks_by_stage(folders)
    for stage in others:
        end_holders(stage, timeout_s=2 * _ANSWER_S)
    settings = folders.find_settings()
    ray = None if settings is None else settings.ray
    if ray is not None and not ray.is_started and not folders.actors_ended.exists():
        _end_actors(folders)
    end_holders(keeper, timeout_s=2 * _ANSWER_S)
    # A signal may have stopped one as it started, before it held its lock.
    for pid in _serving(folders):
        kill(pid)


def _end_serving(folders: Folders) -> None:
    """End a cluster's processes that would start each other again: all at once."""
    deadline_s = now_s() + 2 * _ANSWER_S
    clean_looks = 0
    while clean_looks < _CLEAN_LOOKS and now_s() < deadline_s + _KEEPER_S:
        found = _serving(folders)
        clean_looks = 0 if found else clean_looks + 1
        is_late = now_s() > deadline_s
        for pid in found:
            send(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            continue_process(pid)
        time.sleep(0.05)


def _serving(folders: Folders) -> list[int]:
    """Return what serves the cluster on this host, also what holds no lock yet.

    Supervisors are forks of agents, with the same command.
    """
    attempts = processes.lock_holders(folders.root, LOCK_FILE).values()
    found = [processes.processes_of("-m", m, str(folders.root)) for m in _MODULES]
    return list(set(itertools.chain(*found)).difference(itertools.chain(*attempts)))


def _end_actors(folders: Folders) -> None:
    """End the actors on a Ray that continues: no gateway ran that could."""
    command = [*processes.PYTHON, "-m", GATEWAY, str(folders.root), "end"]
    with (
        contextlib.suppress(OSError, subprocess.TimeoutExpired),
        folders.gateway_log.open("ab") as log,
    ):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            timeout=_ACTORS_S,
            check=False,
        )


def main(folder: str) -> int:
    """Run the keeper of a folder, unless one runs."""
    folders = Folders(Path(folder))
    if processes.lock_as_owner(folders.keeper_lock) is None or folders.down.exists():
        return 0
    ClusterKeeper(folders).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
