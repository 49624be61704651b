"""The process above one attempt's ranks: see `supervisor_start`.

It has a session of its own, outside the tree of the process that started it, and serves
a socket in the attempt's folder. An agent attaches to it, resets its watchdog, and gets
its events in order until it has acknowledged them. When the agent dies, the ranks go
on, and the next agent attaches. If nothing resets the watchdog in time, the supervisor
ends the attempt by itself, so the job may start elsewhere after that time.

The supervisor's lock is taken before it is started and held to its end: while it is
held, the attempt may run. If the supervisor is killed, the kernel kills the ranks with
it, and its guard what they have started (Note [Guards] of `supervisor_start`). If both
are killed, the agent ends what has the variable that marks an attempt's processes.

# Note [Shutdowns]
Agents use the socket, so a SIGTERM to a supervisor says that its host shuts down. The
ranks get one, too, maybe earlier, and may end with any code because of it: 0 after they
have saved their work. So the attempt is lost with its host, whatever they say, and a
rank's own end waits a moment for such a signal before it counts. The end is written at
once, because the supervisor may be killed before its ranks have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from stretto import variable_names
from stretto.cluster import processes
from stretto.cluster.channel import Channel, Listener
from stretto.cluster.loop import Loop, Timer, now_s
from stretto.cluster.memory_use import memory_bytes, out_of_memory_kills
from stretto.cluster.part_spec import (
    END_FILE,
    REQUESTS_FOLDER,
    STEPS_FILE,
    PartSpec,
    rank_commands,
    write_json,
)
from stretto.cluster.plan_changes import PlanChanges
from stretto.cluster.rank_process import RankProcess
from stretto.cluster.step_reports import StepReports
from stretto.lab import syscalls
from stretto.schema.job import BACKGROUND, INDEPENDENT
from stretto.units import format_bytes

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stretto.cluster.part_spec import RankCommand

_CHUNK_BYTES = 1 << 16
_MAX_PIECES = 64
"""Pieces of an ended rank's output copied at once: its children may still write."""

_MAX_CHECK_S = 1.0
"""Between two looks at the watchdog."""

_KILL_AFTER_S = 5.0
_DRAIN_S = 1.0
_RETRY_S = 1.0
_LEAVE_S = 5.0
"""A rank whose device is taken away is killed after this time, or its grace."""

_FAILED_WAIT_S, _DONE_WAIT_S = 0.3, 0.05
"""From the end of the last rank, after a failure or not, until it counts as the ranks'
own: Note [Shutdowns]."""

_SHUTS_DOWN = "its host shut down while it ran"

_MEMORY_S = 0.5
"""Between two looks at the ranks' memory."""

_NOT_STARTED = 127
"""Exit status of a command that does not start, as in a shell."""


@final
class Supervisor:
    """Starts the ranks of one attempt on this host, reports, and ends them."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder, self._socket = folder, listener
        self._part = PartSpec.load(folder)
        self._loop = Loop()
        self._ranks: list[RankProcess] = []
        self._outputs: dict[RankProcess, Callable[[], bool]] = {}
        """The copiers of the outputs that are open."""

        self._steps: StepReports | None = None
        self._plan_changes: PlanChanges | None = None
        self._events: list[dict[str, Any]] = []
        self._next_number = 1
        self._agent: Channel | None = None
        first_s = self._part.first_watchdog_until_s
        full_s = now_s() + self._part.watchdog_s
        self._watchdog_until_s = full_s if first_s is None else min(first_s, full_s)
        self._wanted: tuple[str, ...] | None = None
        self._why = ""
        self._code: int | None = 0
        """``None`` if the watchdog ends it: the host is to blame, not the job."""
        self._failed_rank: int | None = None
        self._failed_s = 0.0
        self._counts_s = 0.0
        """When the ranks' end counts as their own."""

        self._host_shuts_down = False
        self._memory_kills = out_of_memory_kills()
        self._stop_name, self._is_signaled = "", False
        self._kill_timer: Timer | None = None
        self._end: dict[str, Any] | None = None
        self._is_end_kept = False
        self._handlers: dict[str, Callable[[Channel, dict[str, Any]], None]] = {
            "attach": self._attach,
            "reset": self._reset,
            "acknowledge": self._acknowledge,
            "stop": self._asked_to_stop,
            "use": self._use,
        }

    def run(self) -> None:
        """Run the attempt to its end, and until an agent knows of it."""
        syscalls.adopt_orphans()
        guard = os.getppid()
        self._loop.on_signals(
            {
                signal.SIGCHLD: self._on_child,
                signal.SIGTERM: self._on_shutdown,
                signal.SIGHUP: lambda: None,
                signal.SIGINT: lambda: None,
            }
        )
        listener = Listener(self._loop, self._socket, self._on_message, self._on_close)
        if now_s() < self._watchdog_until_s:
            self._begin()
        else:  # the process did not run for a while: another attempt may run by now
            self._check_watchdog()
            self._finish()
        period_s = min(_MAX_CHECK_S, max(0.05, self._part.watchdog_s / 20))
        self._loop.every(period_s, self._check_watchdog)
        self._loop.every(period_s, functools.partial(_continue_guard, guard))
        self._loop.run()
        listener.close()
        _continue_guard(guard)

    # ranks

    def _begin(self) -> None:
        try:
            note = self._prepare()
            self._start_ranks(rank_commands(self._part, self._folder))
        except OSError as error:
            self._fail_to_start(error)
        else:
            self._emit("started", pid=os.getpid(), note=note)
            self._loop.every(self._part.report_every_s, self._report_steps)
            if self._part.host_memory_bytes:
                self._loop.every(_MEMORY_S, self._check_memory)

    def _prepare(self) -> str:
        """Create the ranks' folders; return why their priority stays low, or empty."""
        part = self._part
        note = processes.reset_priority()
        for folder in (part.boards, part.files, part.logs):
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._steps = self._new_steps()
        if part.replan is not None and not part.first_rank:
            requests = self._folder / REQUESTS_FOLDER
            changed = functools.partial(self._emit, "replanned")
            with contextlib.suppress(OSError):  # the job runs by its plan without it
                self._plan_changes = PlanChanges(requests, part.replan, changed)
        return note

    def _new_steps(self) -> StepReports:
        part, path = self._part, self._folder / STEPS_FILE
        path.unlink(missing_ok=True)
        return StepReports(path, part.world_size, part.first_rank, part.batch)

    def _start_ranks(self, commands: Sequence[RankCommand]) -> None:
        part = self._part
        for command in commands:
            rank = RankProcess(command, part.logs)
            is_background = part.role == BACKGROUND
            output = rank.start(part.directory, own_session=is_background)
            self._ranks.append(rank)
            self._forward(output, rank)

    def _forward(self, output: IO[bytes], rank: RankProcess) -> None:
        """Copy a rank's output to its log until it closes it."""
        source = output.fileno()
        os.set_blocking(source, False)

        def read() -> bool:
            """Copy a piece; return whether there may be more now."""
            try:
                piece = os.read(source, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if piece:
                rank.write(piece)
                return True
            self._loop.unwatch(source)
            output.close()
            del self._outputs[rank]
            self._end_if_over()
            return False

        self._outputs[rank] = read
        self._loop.watch(source, read=read)

    def _fail_to_start(self, error: OSError) -> None:
        processes.kill_children()
        self._code = _NOT_STARTED
        self._why = f"the command does not start: {error.strerror}"
        self._finish()

    def _on_child(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._plan_changes is not None and pid == self._plan_changes.pid:
                self._plan_changes.planner_ended()
            for rank in [r for r in self._ranks if r.pid == pid]:
                # Its last lines first: they say why it has ended.
                for _ in range(_MAX_PIECES):
                    if rank not in self._outputs or not self._outputs[rank]():
                        break
                rank.ended(status)
                self._on_rank_end(rank)

    def _on_rank_end(self, rank: RankProcess) -> None:
        if rank.leaves:
            self._ranks.remove(rank)
            self._use_wanted()
        elif rank.code and not self._why:
            self._why, self._failed_rank = rank.failure(), rank.number
            self._failed_s = now_s()
            if rank.code == -signal.SIGKILL:
                self._why += self._memory_hint()
            self._code = rank.code if rank.code > 0 else 128 - rank.code
            self._loop.call_in(
                self._part.peers_grace_s,
                lambda: self._signal_then_kill("TERM", _KILL_AFTER_S),
            )
        if self._has_ended:
            # What the ranks have left behind may keep their outputs open.
            processes.kill_children()
            self._loop.call_in(_DRAIN_S, self._finish)
            if not self._is_signaled:
                wait_s = _FAILED_WAIT_S if self._why else _DONE_WAIT_S
                self._counts_s = now_s() + wait_s
                self._loop.call_in(wait_s, self._end_if_over)
            self._end_if_over()

    def _check_memory(self) -> None:
        """End the attempt if a rank uses more memory than its job may."""
        limit = self._part.host_memory_bytes
        for rank in self._ranks:
            if not rank.runs or rank.pid is None or self._why:
                continue
            used = memory_bytes(rank.pid, above=limit)
            if used > limit:
                self._why = (
                    f"rank {rank.number} and what it started use {format_bytes(used)} "
                    f"of the host's memory; host_memory_bytes permits "
                    f"{format_bytes(limit)}"
                )
                self._code, self._failed_rank = 128 + signal.SIGKILL, rank.number
                self._kill()  # a grace would let it take more

    def _memory_hint(self) -> str:
        """Return what to say of a rank that was killed, if the host lacked memory."""
        if out_of_memory_kills() == self._memory_kills:
            return ""
        return (
            "; the kernel ended a process for memory meanwhile: the host has too "
            "little for its jobs, see host_memory_bytes"
        )

    @property
    def _has_ended(self) -> bool:
        return self._wanted is None and not any(rank.runs for rank in self._ranks)

    def _end_if_over(self) -> None:
        if self._has_ended and not self._outputs and now_s() >= self._counts_s:
            self._finish()

    # other devices

    def _use(self, _channel: Channel, message: dict[str, Any]) -> None:
        """Run on other devices: single processes come and go, a gang starts again."""
        names = tuple(message["devices"])
        if self._has_ended or self._why:
            return
        if names == self._part.devices and self._wanted is None:
            self._emit("using", devices=list(names))
            return
        self._wanted = names
        is_single = self._part.gang == INDEPENDENT
        for rank in self._ranks:
            if rank.runs and not (is_single and rank.device in names):
                rank.leaves = True
                rank.signal(signal.Signals[f"SIG{self._part.signal}"])
                grace_s = min(self._part.grace_s, _LEAVE_S)
                self._loop.call_in(
                    grace_s, functools.partial(rank.signal, signal.SIGKILL)
                )
        self._use_wanted()

    def _use_wanted(self) -> None:
        """Start on the wanted devices once nothing uses the others."""
        if self._wanted is None or any(rank.leaves for rank in self._ranks):
            return
        names, self._wanted = self._wanted, None
        if self._why:  # the attempt ends meanwhile
            return
        before = self._part
        self._end_left_behind(before.devices, names)
        size = before.world_size - len(before.devices) + len(names)
        self._part = dataclasses.replace(before, devices=names, world_size=size)
        numbers = self._numbers(names)
        if before.gang == INDEPENDENT:  # what has ended does not start again
            self._ranks = [r for r in self._ranks if r.runs or r.device in names]
            has_rank = {rank.device for rank in self._ranks}
        else:
            has_rank = set()
        try:
            self._part.save(self._folder)
            if self._part.gang != INDEPENDENT:  # all of its ranks start again
                self._steps = self._new_steps()
            commands = rank_commands(self._part, self._folder, numbers)
            self._start_ranks([c for c in commands if c.device not in has_rank])
        except OSError as error:
            self._fail_to_start(error)
            return
        self._emit("using", devices=list(names))

    def _end_left_behind(self, before: Sequence[str], names: Sequence[str]) -> None:
        """Kill what ranks that have left their devices started there."""
        if self._part.gang != INDEPENDENT:  # none of its ranks runs
            processes.kill_children()
            return
        for name in set(before).difference(names):
            mark = (
                variable_names.CLUSTER_ATTEMPT,
                str(self._folder),
                f"{variable_names.DEVICE}={name}",
            )
            processes.kill_marked(*mark)

    def _numbers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks' numbers: single processes keep theirs."""
        if self._part.gang != INDEPENDENT:
            return ()
        known = {rank.device: rank.number for rank in self._ranks}
        first = max((rank.number for rank in self._ranks), default=-1) + 1
        free = itertools.count(first)
        return tuple(known[n] if n in known else next(free) for n in names)

    # the end

    def _asked_to_stop(self, _channel: Channel, message: dict[str, Any]) -> None:
        name = str(message.get("signal", self._part.signal))
        grace_s = float(message.get("grace_s", self._part.grace_s))
        why = str(message.get("why", "on request"))
        self._stop(why, name if grace_s > 0.0 else "KILL", grace_s)

    def _on_shutdown(self) -> None:
        """End the attempt as lost with its host, whatever its ranks say of it."""
        self._on_child()
        if self._end is not None:
            return
        failed_before = now_s() - self._failed_s > _FAILED_WAIT_S
        if self._failed_rank is None or not failed_before:
            self._host_shuts_down, self._is_signaled = True, True
            self._why, self._code, self._failed_rank = _SHUTS_DOWN, None, None
            self._wanted, self._counts_s = None, 0.0
            with contextlib.suppress(OSError):
                write_json(self._folder / END_FILE, self._outcome())
        self._stop(self._why, "TERM", _LEAVE_S)
        self._end_if_over()

    def _stop(self, why: str, name: str, grace_s: float) -> None:
        """End the ranks; the first cause is the outcome, the shortest grace holds."""
        self._on_child()  # ranks that have ended did so by themselves
        if self._end is not None or self._has_ended:
            return
        self._is_signaled = True
        if not self._why:
            self._why, self._code = why, 128 + signal.Signals[f"SIG{name}"]
        if self._stop_name != name:
            self._stop_name = name
            self._signal_then_kill(name, grace_s)
        else:
            self._kill_in(grace_s)

    def _signal_then_kill(self, name: str, grace_s: float) -> None:
        for rank in self._ranks:
            rank.signal(signal.Signals[f"SIG{name}"])
        self._kill_in(grace_s)

    def _kill_in(self, grace_s: float) -> None:
        timer = self._kill_timer
        if timer is None or now_s() + grace_s < timer.at_s:
            if timer is not None:
                timer.cancel()
            self._kill_timer = self._loop.call_in(grace_s, self._kill)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        # `_on_child` notices that, and ends what they have left behind.

    def _finish(self) -> None:
        if self._end is not None:
            return
        self._report_steps()
        is_done = self._ranks and all(rank.code == 0 for rank in self._ranks)
        if is_done and not self._host_shuts_down:
            self._code = 0
        self._end = self._outcome()
        self._write_end()
        self._emit("ended", **self._end)

    def _outcome(self) -> dict[str, Any]:
        return {
            "code": self._code,
            "why": self._why,
            "rank": self._failed_rank,
            "signaled": self._is_signaled,
        }

    def _write_end(self) -> None:
        try:
            write_json(self._folder / END_FILE, self._end)
        except FileNotFoundError:  # the cluster's folder was removed
            self._is_end_kept = True
        except OSError:  # a full disk; the event says it, too
            self._loop.call_in(_RETRY_S, self._write_end)
        else:
            self._is_end_kept = True

    def _check_watchdog(self) -> None:
        if now_s() < self._watchdog_until_s:
            return
        self._on_child()
        if self._end is not None:
            # Without the file, this process alone knows that it was not killed.
            if self._is_end_kept:
                self._loop.stop()
            return
        if self._ranks and self._has_ended:
            self._finish()
            return
        if not self._why:
            watchdog_s = self._part.watchdog_s
            self._why = f"no agent reset the watchdog for {watchdog_s:g} s"
            self._code = None
        self._is_signaled = True
        # Another attempt may start when the watchdog has fired: there is no grace.
        self._kill()

    # the agent

    def _report_steps(self) -> None:
        report = None if self._steps is None else self._steps.next()
        if report is not None and self._end is None:
            self._emit("step", **report)
        if self._plan_changes is not None and self._end is None:
            self._plan_changes.look(report)

    def _emit(self, kind: str, **data: Any) -> None:
        event = {"number": self._next_number, "kind": kind, "data": data}
        self._next_number += 1
        if kind == "step" and self._agent is None:
            # While no agent listens, the last report is enough.
            self._events = [e for e in self._events if e["kind"] != "step"]
        self._events.append(event)
        if self._agent is not None:
            self._agent.send({"event": event})

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> None:
        handler = self._handlers.get(str(message.get("do")))
        if handler is None:
            channel.send({"error": f"unknown request {message.get('do')!r}"})
            return
        handler(channel, message)

    def _on_close(self, channel: Channel) -> None:
        if channel is self._agent:
            self._agent = None

    def _attach(self, channel: Channel, message: dict[str, Any]) -> None:
        self._agent = channel
        self._reset(channel, message)
        part = dataclasses.asdict(self._part)  # its file may be unreadable
        channel.send({"attached": list(self._part.fence), "part": part})
        for event in self._events:
            channel.send({"event": event})

    def _reset(self, _channel: Channel, message: dict[str, Any]) -> None:
        # A time of this host's clock: a message that was read late resets nothing.
        until_s = min(
            float(message.get("until_s", 0.0)), now_s() + self._part.watchdog_s
        )
        self._watchdog_until_s = max(self._watchdog_until_s, until_s)

    def _acknowledge(self, _channel: Channel, message: dict[str, Any]) -> None:
        number = int(message.get("number", 0))
        self._events = [e for e in self._events if e["number"] > number]
        if self._end is not None and not self._events:
            self._loop.stop()


def _continue_guard(guard: int) -> None:
    """Continue the guard if a signal has stopped it: it would never end."""
    if os.getppid() == guard:
        with contextlib.suppress(OSError):
            os.kill(guard, signal.SIGCONT)
