"""The coordinator's process: a `Coordinator` behind a socket, for agents and commands.

It may be killed at any time: the store has every event that it acknowledged, and agents
send the others again. Supervisors and ranks do not notice.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto.cluster import job_plans, processes, queries
from stretto.cluster.channel import Channel, Listener, listening
from stretto.cluster.commands import Command, MakePlan, StartPart
from stretto.cluster.coordinator import Clock, Coordinator
from stretto.cluster.engine_local import (
    COORDINATOR_ENDS,
    served_locks,
    start_keeper,
)
from stretto.cluster.folders import Folders
from stretto.cluster.ledger import Ledger, Limits
from stretto.cluster.loop import Loop, Timer, now_s, wall_s
from stretto.cluster.part_spec import write_json
from stretto.cluster.policies import registry
from stretto.cluster.records import ENDS
from stretto.cluster.roles import StoppedHolders
from stretto.cluster.store import Store, read_only, read_page
from stretto.cluster.wire import event_of, plain_command
from stretto.errors import SpecError, StoreUnavailable, StrettoError
from stretto.logs import get_logger
from stretto.process_identity import boot_id
from stretto.schema import codec
from stretto.schema.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_log = get_logger(__name__)

_SILENT_BEATS = 4

_KEEPER_S = 2.0
_THIN_S = 1.0
"""Between two pieces of old reports of steps that are removed."""

_MIN_PAUSE_S = 0.001
_AHEAD_S = 60.0
"""The cluster's clock may be so far ahead of the host's without a word."""

_MAX_MEETINGS = 4096
_MAX_TEXT = 2000
"""Characters of an error in an answer or in the log."""

_MAX_UNSENT_BYTES = 1 << 20
"""Limit of answers to one client; see the note of `channel.Channel`."""


def _text(value: object) -> str:
    """Return a message's text, in which UTF-8 can encode all: the store is UTF-8."""
    return str(value).encode(errors="replace").decode()


def _bounded(text: str) -> str:
    """Return what an answer or the log says, which may quote a request."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... ({len(text)} characters)"


def steady_wall(folders: Folders, last_s: float = 0.0) -> Callable[[], float]:
    """Return the wall clock as the first coordinator since the host's start saw it.

    Fences are times on it, so no change of the time of day between two coordinators may
    move it. If it was behind the last kept event, it continues from there: a clock that
    each coordinator began there would lengthen what jobs wait for.
    """
    boot = boot_id()
    try:
        found = json.loads(folders.clock.read_bytes())
        kept_s = float(found["base_s"]) if found["boot"] == boot else None
    except (OSError, ValueError, KeyError, TypeError):
        kept_s = None
    seen_s = wall_s() - now_s()
    base_s = max(seen_s if kept_s is None else kept_s, last_s - now_s())
    if base_s - seen_s > _AHEAD_S:
        _log.warning(
            "the times of events are %.0f s ahead of this host's clock, which was "
            "ahead before; waits have their right length",
            base_s - seen_s,
        )
    if base_s != kept_s:
        with contextlib.suppress(OSError):
            write_json(folders.clock, {"boot": boot, "base_s": base_s})
    return lambda: base_s + now_s()


@final
class Server:
    """Answers agents and commands in one thread."""

    def __init__(self, folders: Folders) -> None:
        """Begin with the store's events.

        Raises:
            ClusterError: the store cannot be opened, or another coordinator has it.
        """
        settings = folders.load_settings()
        self.folders, self.settings = folders, settings
        limits = Limits(
            silent_s=_SILENT_BEATS * settings.heartbeat_s,
            watchdog_s=settings.watchdog_s,
            margin_s=settings.margin_s,
        )
        self.ledger = Ledger(registry.get(settings.policy), limits)
        self.store = Store(folders.root)
        last_s = self.store.last_s
        self.clock = Clock(last_s, steady_wall(folders, last_s), now_s)
        self.coordinator = Coordinator(self.ledger, self.store, self.clock)
        known = frozenset(self.ledger.cluster.hosts)
        self.ledger.gone = known - folders.hosts(settings).keys()
        self.ledger.first_number = 1 + folders.last_job_number()
        self._loop = Loop()
        self._agents: dict[str, Channel] = {}
        self._sent: dict[str, set[Any]] = {}
        self._sent_s: dict[str, float] = {}
        """When each host sent its last message, on its own clock."""

        self._meetings: dict[str, tuple[str, int]] = {}
        self._timer: Timer | None = None
        self._planning: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Serve until a signal."""
        self._loop.on_signals(
            {
                signal.SIGTERM: self._loop.stop,
                signal.SIGINT: self._loop.stop,
                signal.SIGHUP: lambda: None,
                signal.SIGCHLD: self._on_planned,
            }
        )
        self._listener = self._listen()
        self._undo_end()
        self._tick_soon()
        # Agents do so, too, but only if they do not find this coordinator.
        self._loop.every(_KEEPER_S, self._start_keeper)
        stopped = StoppedHolders(lambda: served_locks(self.folders))
        self._loop.every(_KEEPER_S, stopped.look)
        self._loop.every(_KEEPER_S, self._keep_socket)
        self._loop.every(_KEEPER_S, self._undo_end)
        self._loop.every(_THIN_S, self._thin_steps)
        self._loop.run()
        self._listener.close()
        with contextlib.suppress(OSError):
            self.folders.socket.unlink()  # while no other coordinator can have its own
        self.store.close()

    def _listen(self) -> Listener:
        return Listener(
            self._loop,
            listening(self.folders.socket),
            self._on_message,
            self._on_close,
            max_unsent_bytes=_MAX_UNSENT_BYTES,
        )

    def _keep_socket(self) -> None:
        """Listen again if something has removed the socket's file.

        Raises:
            ClusterError: the lock's file was removed, maybe with the whole folder.
        """
        self.store.check_lock()
        if self.folders.socket.exists():
            return
        with contextlib.suppress(OSError):
            found = self._listen()
            self._listener.close()
            self._listener = found

    def _start_keeper(self) -> None:
        with contextlib.suppress(OSError):
            start_keeper(self.folders)  # unless one runs

    def _thin_steps(self) -> None:
        if not self.coordinator.trouble:
            self.store.thin_steps()

    def _undo_end(self) -> None:
        """Use hosts again that a `down` has drained, unless one is at work.

        It may have ended the cluster, which runs again now, or have been killed.
        """
        hosts = self.ledger.cluster.hosts.values()
        ending = [host.name for host in hosts if host.is_ending]
        if not ending or processes.is_locked(self.folders.ending):
            return
        with contextlib.suppress(StoreUnavailable):  # later
            for host in ending:
                self.coordinator.open(host, user="the end of `down`")
        self._tick_soon()

    # messages

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> None:
        if message.get("do") == "push":
            try:
                self._on_push(channel, message)
            except (StrettoError, KeyError, TypeError, ValueError) as error:
                why = _bounded(repr(error))
                _log.warning("an agent's message is invalid: %s", why)
                channel.close()
            return
        answer = _HANDLERS.get(str(message.get("do")), Server._unknown)
        try:
            found = answer(self, message)
        except StrettoError as error:
            found = {"error": _bounded(str(error)), "exit": error.exit_code}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            found = {"error": _bounded(f"invalid request: {error!r}"), "exit": 2}
        except Exception as error:
            # An answer, or the same request would come again and again. The next
            # coordinator continues from the store; here, a change may be half done.
            log = self.folders.coordinator_log
            why = f"the coordinator failed ({error!r:.500}) and starts again: see {log}"
            channel.send({"error": why, "exit": 1})
            raise
        channel.send(found)
        self._tick_soon()

    def _on_close(self, channel: Channel) -> None:
        host = channel.peer
        if host is not None and self._agents.get(host) is channel:
            del self._agents[host]

    def _on_push(self, channel: Channel, message: dict[str, Any]) -> None:
        host, agent = _text(message["host"]), _text(message["agent"])
        for fence, (address, port) in dict(message.get("meetings", {})).items():
            if len(self._meetings) >= _MAX_MEETINGS:
                self._meetings.pop(next(iter(self._meetings)))
            self._meetings[fence] = (str(address), int(port))
        events = [event_of(each) for each in message["events"]]
        answer = self.coordinator.push(host, agent, events)
        if self._agents.get(host) is not channel:
            self._agents[host], self._sent[host] = channel, set()
            channel.peer = host
            self.ledger.gone -= {host}
        self._sent_s[host] = float(message["sent_s"])
        if answer.join:
            self._agents.pop(host, None)
        if not message["events"]:
            self._sent[host].clear()  # a heartbeat gets all that is outstanding
        channel.send(
            {
                "acknowledged": answer.acknowledged,
                "sent_s": message["sent_s"],
                "commands": self._new_commands(host, answer.commands),
                "join": answer.join,
            }
        )
        if message["events"]:
            self._tick_soon()

    # commands for agents

    def _tick_soon(self, delay_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_in(delay_s, self._tick)

    def _tick(self) -> None:
        next_s = self.coordinator.tick()
        if not self.coordinator.trouble:
            for host, channel in list(self._agents.items()):
                commands = self._new_commands(host, self.ledger.commands(host))
                if commands:
                    sent_s = self._sent_s[host]
                    channel.send({"commands": commands, "sent_s": sent_s})
        self._start_planning()
        if next_s is not None:
            self._tick_soon(max(next_s, _MIN_PAUSE_S))

    # plans

    def _start_planning(self) -> None:
        for command in self.coordinator.plans_to_make():
            if command.job in self._planning:
                continue
            module = "stretto.cluster.job_plans"
            words = [str(self.folders.root), command.job, command.profile]
            try:
                job_plans.save_request(self.folders, command.job, command.spec)
                self._planning[command.job] = subprocess.Popen(
                    [*processes.PYTHON, "-m", module, *words],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            except (OSError, SpecError) as error:
                why = f"planning does not start: {error}"
                self.coordinator.planned(command.job, None, why=why)

    def _on_planned(self) -> None:
        for job, process in list(self._planning.items()):
            if process.poll() is not None:
                del self._planning[job]
                speeds, why = job_plans.read_answer(self.folders, job)
                self.coordinator.planned(job, speeds, why=why)
        self._tick_soon()

    def _new_commands(
        self, host: str, commands: Iterable[Command]
    ) -> list[dict[str, Any]]:
        """Return the commands that were not yet sent on this connection of a host."""
        found, sent = [], self._sent[host]
        for command in commands:
            if isinstance(command, MakePlan):
                continue
            body = plain_command(command)
            if isinstance(command, StartPart) and host != command.hosts[0]:
                # The first host chooses where the ranks meet.
                meeting = self._meetings.get(f"{command.job}.{command.attempt}")
                if meeting is not None:
                    body["meeting"] = meeting
                elif not self._has_ended(command.job, command.hosts[0]):
                    continue
            key = json.dumps([v for k, v in sorted(body.items()) if k != "spec"])
            if key not in sent:
                sent.add(key)
                found.append(body)
        return found

    def _has_ended(self, job: str, host: str) -> bool:
        """Return whether a host's ranks of a job have ended: it names no meeting."""
        attempt = self.ledger.state.records[job].live
        return attempt is not None and attempt.parts[host].has_ended

    # requests of the command line

    def _unknown(self, message: dict[str, Any]) -> dict[str, Any]:
        known = ", ".join(["push", *_HANDLERS])
        raise SpecError(
            f"unknown request {message.get('do')!r:.80}; known are {known}. Command "
            "and coordinator may be of two releases: start the cluster again"
        )

    def _submit(self, message: dict[str, Any]) -> dict[str, Any]:
        source = str(message.get("source", "job"))
        spec = codec.decode(_text(message["spec"]).encode(), Job, source=source)
        user, request = _text(message["user"]), _text(message.get("request", ""))
        return {"job": self.coordinator.submit(spec, user=user, request=request)}

    def _stop(self, message: dict[str, Any]) -> dict[str, Any]:
        view = self.ledger.job(str(message["job"]))
        if view.state in ENDS:
            return {"job": view.id, "ended": view.state}
        self.coordinator.stop(view.id, user=_text(message.get("user", "")))
        return {"job": view.id, "ended": ""}

    def _drain(self, message: dict[str, Any]) -> dict[str, Any]:
        host, user = self._known(message), _text(message.get("user", ""))
        if message.get("open"):
            self.coordinator.open(host, user=user)
        else:
            # A command line of before `ends` names no user but the end of the cluster.
            ends = bool(message.get("ends", user == "down"))
            self.coordinator.drain(host, user=user, ends=ends)
        return {"host": host}

    def _known(self, message: dict[str, Any]) -> str:
        host = str(message["host"])
        if host not in (hosts := self.folders.hosts(self.settings)):
            raise SpecError(f"{host:.80}: no such host; there are {', '.join(hosts)}")
        return host

    def _list(self, _message: dict[str, Any]) -> dict[str, Any]:
        return {"jobs": queries.job_rows(self.ledger, self.clock())}

    def _show(self, message: dict[str, Any]) -> dict[str, Any]:
        name = str(message["job"])
        found = queries.job_details(self.ledger, name, self.clock())
        logs = self.folders.logs(found["job"], found["attempt"])
        return found | {"logs": str(logs)}

    def _status(self, _message: dict[str, Any]) -> dict[str, Any]:
        trouble = self.coordinator.trouble
        return queries.status(
            self.ledger,
            self.settings.policy,
            self.folders.hosts(self.settings),
            set(self._agents),
            trouble,
            self._why_silent,
        )

    def _why_silent(self, host: str) -> str:
        """Return what to do about a host that is not heard from.

        Only of this machine's own agents more is known than that.
        """
        if host not in self.settings.hosts:
            return "see whether its machine and Ray run there"
        if self.settings.ray is not None:
            folders = self.folders.of_node(host)
        else:
            folders = self.folders
        lock = folders.agent_lock(host)
        return f"see {lock.with_name('agent.log')}"

    def _events(self, message: dict[str, Any]) -> dict[str, Any]:
        since, job = int(message["since"]), message.get("job")
        if job is not None:
            job = self.ledger.job(str(job)).id
        database = read_only(self.folders.root)
        with contextlib.closing(database):
            rows = read_page(database, self.folders.root, since=since, job=job)
        return {"events": rows}


_HANDLERS: dict[str, Callable[[Server, dict[str, Any]], dict[str, Any]]] = {
    "submit": Server._submit,  # noqa: SLF001
    "stop": Server._stop,  # noqa: SLF001
    "drain": Server._drain,  # noqa: SLF001
    "list": Server._list,  # noqa: SLF001
    "show": Server._show,  # noqa: SLF001
    "status": Server._status,  # noqa: SLF001
    "events": Server._events,  # noqa: SLF001
}


def main(folder: str) -> int:
    """Run the coordinator of a folder, unless it runs already."""
    folders = Folders(Path(folder))
    if folders.down.exists():  # it was marked while this process started
        return 0
    try:
        Server(folders).run()
    except StrettoError as error:
        _log.error("%s%s%s", folder, COORDINATOR_ENDS, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
