"""The process of one host: ``python -m stretto.cluster.agent FOLDER HOST``.

It gives out the host's devices as the coordinator says, starts and adopts supervisors,
and reports what happens, each event once and in order. It keeps nothing in memory that
it could not find again: attempts are folders, supervisors hold their lock, and events
that the coordinator has not acknowledged stay with their supervisor.

Every message that the coordinator answers resets the watchdogs of the host's attempts,
from the moment at which the message was sent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import variable_names
from stretto.cluster import events, processes, supervisor_start
from stretto.cluster.attempt_ends import supervisors_among
from stretto.cluster.channel import Channel, connected
from stretto.cluster.commands import PROFILE, MakePlan, StartPart, StopPart, UseDevices
from stretto.cluster.coordinator_link import CoordinatorLink, Fence
from stretto.cluster.engine_local import served_locks
from stretto.cluster.folders import Folders
from stretto.cluster.loop import Loop, now_s, wall_s
from stretto.cluster.part_spec import (
    LOCK_FILE,
    PART_FILE,
    SOCKET_FILE,
    PartSpec,
)
from stretto.cluster.part_start import part_spec_of, profile_path
from stretto.cluster.roles import (
    StoppedHolders,
    continue_process,
    continue_stopped,
    kill,
)
from stretto.cluster.wire import command_of
from stretto.errors import StrettoError
from stretto.logs import get_logger
from stretto.process_identity import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger(__name__)

_RETRY_S = 0.05
_MAX_DIGITS = 32

_GUARD_LOOKS = 5
"""Looks, one per second, within which a guard ends after its supervisor."""

_EVENT_KINDS = {
    "started": events.STARTED,
    "step": events.STEP,
    "checkpointed": events.CHECKPOINTED,
    "replanned": events.REPLANNED,
}


@final
@dataclass(slots=True)
class _Part:
    """An attempt on this host."""

    folder: Path
    spec: PartSpec | None
    """``None`` until its supervisor says it, if its file cannot be read."""

    indices: tuple[int, ...]
    """All devices of the host while ``spec`` is not known."""

    channel: Channel | None = None
    stop_grace_s: float | None = None
    """The grace period of the stop that the supervisor knows of."""

    end: dict[str, Any] | None = None
    wanted: tuple[int, ...] | None = None
    removed_looks: int = 0
    """How often something that holds the removed lock was found."""


@final
class Agent:
    """Gives out one host's devices."""

    def __init__(self, folders: Folders, host: str) -> None:
        settings = folders.load_settings()
        self._folders, self._host, self._settings = folders, host, settings
        self._devices = settings.hosts[host]
        self._life = _next_life(folders.host(host) / "life")
        self._loop = Loop()
        self._parts: dict[Fence, _Part] = {}
        self._latest: dict[str, int] = {}
        self._link = CoordinatorLink(
            self._loop,
            folders,
            host,
            self._life,
            joined=self._joined,
            meetings=self._meetings,
            execute=self._execute,
        )

    def run(self) -> None:
        """Adopt what runs, and serve until a signal."""
        self._loop.on_signals(
            {
                signal.SIGCHLD: _reap,
                signal.SIGTERM: self._loop.stop,
                signal.SIGINT: self._loop.stop,
                signal.SIGHUP: lambda: None,
            }
        )
        self._folders.attempts(self._host).mkdir(
            mode=0o700, parents=True, exist_ok=True
        )
        self._adopt_all()
        self._link.connect()
        self._loop.every(self._settings.heartbeat_s, self._link.beat)
        period_s = min(2.0, self._settings.watchdog_s / 10)
        self._loop.every(period_s, self._reset_watchdogs)
        self._loop.every(period_s, StoppedHolders(self._locks).look)
        if not self._settings.has_keeper:
            self._loop.every(period_s, self._end_if_forgotten)
        self._loop.run()

    def _locks(self) -> list[Path]:
        """Return the locks of what runs here, and of what serves the cluster here."""
        parts = [part.folder / LOCK_FILE for part in self._parts.values()]
        return served_locks(self._folders) + parts

    # the coordinator

    def _joined(self) -> dict[str, Any]:
        attempts = []
        for (job, number), part in self._parts.items():
            row: dict[str, Any] = {
                "job": job,
                "attempt": number,
                "state": "running" if part.end is None else "ended",
                "devices": list(part.indices),
            }
            row |= part.end or {}
            attempts.append(row)
        devices = [
            {"index": index, "memory_bytes": self._settings.memory_bytes}
            for index in range(len(self._devices))
        ]
        return {"life": self._life, "devices": devices, "attempts": attempts}

    def _meetings(self) -> dict[str, list[Any]]:
        """Return where ranks meet whose first is on this host and others are not."""
        return {
            _name(fence): [part.spec.master_address, part.spec.master_port]
            for fence, part in self._parts.items()
            if part.spec is not None
            and part.spec.world_size > len(part.indices)
            and not part.spec.first_rank
        }

    # commands

    def _execute(self, body: dict[str, Any]) -> None:
        meeting = body.pop("meeting", None)
        command = command_of(body)
        if isinstance(command, MakePlan):
            return
        fence = command.job, command.attempt
        if isinstance(command, StartPart):
            self._start(command, meeting)
        elif isinstance(command, StopPart):
            self._stop(fence, command)
        else:
            self._use(fence, command)

    def _start(self, command: StartPart, meeting: list[Any] | None) -> None:
        fence = command.job, command.attempt
        if fence in self._parts:
            return
        if self._latest.get(command.job, 0) >= command.attempt:
            self._refuse(fence, "a later attempt of the job is known here", None)
            return
        if self._runs(command.job):
            return  # after a pause of the host; each heartbeat brings the command again
        self._latest[command.job] = command.attempt
        if command.purpose == PROFILE and not self._must_profile(command):
            return
        folder = self._folders.attempts(self._host) / _name(fence)
        try:
            spec = part_spec_of(
                command,
                self._folders,
                self._devices,
                settings=self._settings,
                meeting=meeting,
                watchdog_until_s=self._link.watchdog_until_s,
            )
            folder.mkdir(mode=0o700, exist_ok=True)
            spec.save(folder)
            pid = supervisor_start.start(folder, forks=True)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = f"{folder} cannot be used on {self._host}: {error.strerror}"
            self._refuse(fence, why, 1)
            return
        self._parts[fence] = _Part(folder, spec, command.devices)
        if pid is None:
            raise AssertionError(f"{folder} is new, but already has a supervisor")
        self._attach(fence)

    def _runs(self, job: str) -> bool:
        """Return whether an attempt of a job has not ended here."""
        return any(
            name == job and part.end is None for (name, _), part in self._parts.items()
        )

    def _must_profile(self, command: StartPart) -> bool:
        """Report a profile that is known already, or why there can be none."""
        fence = command.job, command.attempt
        if command.spec.batch is None:
            why = "the job file has no batch, which a profile needs"
            self._link.report(events.ENDED, fence, {"code": 2, "why": why})
            return False
        path = profile_path(command.spec, self._folders, self._devices)
        if not path.exists():
            return True
        self._link.report(events.PROFILED, fence, {"profile": str(path)})
        self._link.report(events.ENDED, fence, {"code": 0, "signaled": False})
        return False

    def _refuse(self, fence: Fence, why: str, code: int | None) -> None:
        self._link.report(events.ENDED, fence, {"code": code, "why": why})

    def _stop(self, fence: Fence, command: StopPart) -> None:
        part = self._parts.get(fence)
        if part is None:
            self._latest[fence[0]] = max(fence[1], self._latest.get(fence[0], 0))
            self._refuse(fence, "the attempt is not known on this host", None)
            return
        known_s = part.stop_grace_s
        if part.channel is None or (known_s is not None and command.grace_s >= known_s):
            return
        part.stop_grace_s = command.grace_s
        part.channel.send(_stop_message(command))

    def _use(self, fence: Fence, command: UseDevices) -> None:
        part = self._parts.get(fence)
        if part is None or part.channel is None or part.wanted == command.devices:
            return
        part.wanted = command.devices
        names = [self._devices[index] for index in command.devices]
        part.channel.send({"do": "use", "devices": names})

    # supervisors

    def _adopt_all(self) -> None:
        """Adopt the attempts that have a folder.

        # Note [What an unreadable file says]
        A file may be cut off by a host that lost power, or be of another release. It
        says nothing of what runs: the supervisor's lock does, and the processes with
        the mark of the attempt. So an attempt whose file cannot be read is adopted by
        its folder's name, and its supervisor says the rest. It has ended once its lock
        is free and none of its processes is left.

        # Note [What a removed folder says]
        A cleanup may remove files, also while their attempt runs. A removed lock is
        still held, and found with the processes. As long as the supervisor can be
        reached, its attempt continues; otherwise it is ended, as one that was lost.
        """
        for folder in sorted(self._folders.attempts(self._host).iterdir()):
            spec, fence = _read_part(folder), _fence_of(folder)
            if spec is None and self._was_never_started(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            if fence is None:
                _log.warning("%s is no attempt's folder: leaves it", folder)
                continue
            job, attempt = fence
            self._parts[fence] = _Part(folder, spec, self._indices_of(spec))
            self._latest[job] = max(attempt, self._latest.get(job, 0))
            if spec is None:
                _log.warning(
                    "%s cannot be read: asks the attempt's supervisor instead",
                    folder / PART_FILE,
                )
            self._attach(fence)
        self._adopt_removed()

    def _adopt_removed(self) -> None:
        """Adopt what runs of attempts whose folder was removed, to end it."""
        attempts = self._folders.attempts(self._host)
        for lock in processes.lock_holders(attempts, LOCK_FILE, removed=True):
            fence = _fence_of(lock.parent)
            if fence is None or fence in self._parts:
                continue
            _log.warning("files in %s were removed: ends the attempt", lock.parent)
            self._parts[fence] = _Part(lock.parent, None, self._indices_of(None))
            self._latest[fence[0]] = max(fence[1], self._latest.get(fence[0], 0))
            self._attach(fence)

    @staticmethod
    def _was_never_started(folder: Path) -> bool:
        """Return whether a start was cut short before the supervisor's."""
        return (
            not (folder / LOCK_FILE).exists()
            and not processes.lock_holders(folder, LOCK_FILE, removed=True)
            and processes.kill_marked(variable_names.CLUSTER_ATTEMPT, str(folder))
        )

    def _indices_of(self, spec: PartSpec | None) -> tuple[int, ...]:
        """Return the numbers of a part's devices; all, if they are not known."""
        names = self._devices if spec is None else spec.devices
        return tuple(self._devices.index(n) for n in names if n in self._devices)

    def _learn(self, part: _Part, message: dict[str, Any]) -> None:
        """Take a part whose file cannot be read from its supervisor's answer."""
        try:
            spec = PartSpec.of_plain(message.get("part"), str(part.folder))
        except ValueError:  # a supervisor of an earlier release does not say it
            return
        part.spec, part.indices = spec, self._indices_of(spec)
        with contextlib.suppress(OSError):
            spec.save(part.folder)

    def _attach(self, fence: Fence) -> None:
        """Connect to a supervisor, or find out that it has ended."""
        part = self._parts.get(fence)
        if part is None or part.end is not None:
            return
        try:
            connection = connected(part.folder / SOCKET_FILE, timeout_s=1.0)
        except OSError:
            if processes.is_locked(part.folder / LOCK_FILE):
                self._loop.call_in(_RETRY_S, lambda: self._attach(fence))
            else:
                self._on_supervisor_dead(fence, part)
            return
        part.channel = Channel(
            self._loop,
            connection,
            lambda channel, message: self._on_report(fence, channel, message),
            lambda channel: self._on_detached(fence, channel),
        )
        part.channel.send({"do": "attach", "until_s": self._link.watchdog_until_s})

    def _on_detached(self, fence: Fence, channel: Channel) -> None:
        part = self._parts.get(fence)
        if part is None or part.channel is not channel:
            return
        part.channel, part.stop_grace_s, part.wanted = None, None, None
        self._attach(fence)

    def _on_supervisor_dead(self, fence: Fence, part: _Part) -> None:
        """End what a supervisor has left, and report the attempt's end."""
        is_over = not self._end_removed(part)
        if not (
            processes.kill_marked(variable_names.CLUSTER_ATTEMPT, str(part.folder))
            and is_over
        ):
            # Not ended while a process lives, such as one in a lost file system.
            self._loop.call_in(1.0, lambda: self._on_supervisor_dead(fence, part))
            return
        found = supervisor_start.read_end(part.folder)
        if found is None or (found["code"] != 0 and _is_of_earlier_boot(part)):
            # As its host ended, it may have failed for want of what ended before.
            found = _end_of_killed(part)
        self._ended(fence, part, found)

    @staticmethod
    def _end_removed(part: _Part) -> bool:
        """End an attempt whose lock was removed; return whether anything was left.

        Its guard ends by itself, once it has killed what the ranks have started.
        """
        found = processes.lock_holders(part.folder, LOCK_FILE, removed=True)
        holders = found.get(part.folder / LOCK_FILE, [])
        if not holders:
            return False
        ended = supervisors_among(holders)
        part.removed_looks += 1
        if part.removed_looks > _GUARD_LOOKS:  # its guard was killed before
            ended.update(holders)
        for pid in ended:
            kill(pid)
        for pid in holders:
            continue_process(pid)
        return True

    def _on_report(
        self, fence: Fence, channel: Channel, message: dict[str, Any]
    ) -> None:
        event, part = message.get("event"), self._parts.get(fence)
        if part is not None and part.spec is None and "attached" in message:
            self._learn(part, message)
        if event is None or part is None:
            return
        kind, data = event["kind"], event["data"]

        def keep() -> None:
            channel.send({"do": "acknowledge", "number": event["number"]})

        if kind == "ended":
            self._ended(fence, part, data, keep)
        elif kind == "using":
            self._on_using(fence, part, data["devices"], keep)
        elif kind in _EVENT_KINDS:
            self._link.report(_EVENT_KINDS[kind], fence, data, keep)
        else:
            keep()

    def _on_using(
        self, fence: Fence, part: _Part, names: list[str], keep: Callable[[], None]
    ) -> None:
        before = part.indices
        part.indices = tuple(self._devices.index(name) for name in names)
        grows = len(part.indices) > len(before)
        self._link.report(
            events.ATTACHED if grows else events.DETACHED,
            fence,
            {"devices": list(part.indices)},
            keep,
        )

    def _ended(
        self,
        fence: Fence,
        part: _Part,
        end: dict[str, Any],
        keep: Callable[[], None] | None = None,
    ) -> None:
        if part.end is not None:
            return
        part.end = end
        profile = "" if part.spec is None else part.spec.profile
        if profile and end["code"] == 0 and Path(profile).exists():
            self._link.report(events.PROFILED, fence, {"profile": profile})

        def forget() -> None:
            if keep is not None:
                keep()
            self._parts.pop(fence, None)
            continue_stopped([part.folder / LOCK_FILE])  # it would never end
            shutil.rmtree(part.folder, ignore_errors=True)

        self._link.report(events.ENDED, fence, end, forget)

    def _reset_watchdogs(self) -> None:
        if not self._folders.agent_lock(self._host).exists():
            self._loop.stop()  # its folder was removed; a keeper would start another
            return
        until_s = self._link.watchdog_until_s
        for part in self._parts.values():
            if part.channel is not None:
                part.channel.send({"do": "reset", "until_s": until_s})

    def _end_if_forgotten(self) -> None:
        """End if the cluster has gone and nothing runs here.

        An actor may restart it: what has not been acknowledged is found again. A keeper
        ends its agents itself.
        """
        runs = any(part.end is None for part in self._parts.values())
        if not runs and now_s() > self._link.watchdog_until_s:
            self._loop.stop()


def _next_life(path: Path) -> int:
    """Return the number of this life of a host's agent, and note it.

    It overwrites the one before, which is no longer: that works on a full disk, too.
    If the file is missing or cut off, the number is of this time, which is higher than
    any count: with a number that the host had before, its reports would be dropped as
    repeated ones.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        found = os.pread(descriptor, _MAX_DIGITS, 0)
        number = int(found) + 1 if found.strip().isdigit() else int(wall_s() * 1e6)
        os.pwrite(descriptor, str(number).encode(), 0)
    finally:
        os.close(descriptor)
    return number


def _name(fence: Fence) -> str:
    job, attempt = fence
    return f"{job}.{attempt}"


def _fence_of(folder: Path) -> Fence | None:
    """Return what `_name` has made a folder's name of, or ``None``."""
    job, _, number = folder.name.rpartition(".")
    is_one = job and number.isascii() and number.isdigit()
    return (job, int(number)) if is_one else None


def _read_part(folder: Path) -> PartSpec | None:
    """Return what a folder's file says, or ``None`` if it cannot be read."""
    try:
        return PartSpec.load(folder)
    except (OSError, ValueError):
        return None


def _end_of_killed(part: _Part) -> dict[str, Any]:
    """Return how an attempt ended whose supervisor could not say so."""
    spec = part.spec
    if part.removed_looks:
        # As a lost host, which counts as no failure of the job.
        why = f"files in {part.folder} were removed while it ran"
        return {"code": None, "why": why, "signaled": True}
    if spec is None:
        # The host may have been started again: that counts as no failure of the job.
        why = f"no process of it is left, and {part.folder / PART_FILE} is unreadable"
        return {"code": None, "why": why, "signaled": True}
    if _is_of_earlier_boot(part):
        # As a lost host, which counts as no failure of the job.
        why = "its host was started again while it ran"
        return {"code": None, "why": why, "signaled": True}
    why = "the supervisor of the attempt was killed"
    return {"code": 128 + signal.SIGKILL, "why": why, "signaled": False}


def _is_of_earlier_boot(part: _Part) -> bool:
    """Return whether the host was started again since an attempt started."""
    boot = "" if part.spec is None else part.spec.boot
    return bool(boot) and boot != boot_id()


def _stop_message(command: StopPart) -> dict[str, Any]:
    return {
        "do": "stop",
        "signal": command.signal,
        "grace_s": command.grace_s,
        "why": command.why,
    }


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(folder: str, host: str) -> int:
    """Run a host's agent, unless it runs already."""
    folders = Folders(Path(folder))
    folders.host(host).mkdir(mode=0o700, parents=True, exist_ok=True)
    if processes.lock_as_owner(folders.agent_lock(host)) is None:
        return 0
    if folders.down.exists():  # it was marked while this process started
        return 0
    try:
        agent = Agent(folders, host)
    except StrettoError as error:
        _log.error("%s: the agent ends: %s", host, error)
        return error.exit_code
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
