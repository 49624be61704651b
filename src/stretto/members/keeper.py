"""The keeper: starts a host's ranks, sees them end, and gives the others a new view.

It is a process of its own without torch, so that it answers within milliseconds
whatever the ranks compute. Ranks are its children and end with it.

It decides alone for the ranks of one host. `KeeperCore` decides for several; the
connections between keepers are not written yet.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto.cluster.channel import Channel, Listener, listening
from stretto.cluster.loop import Loop, now_s
from stretto.lab import syscalls
from stretto.lab.ports import free_port
from stretto.logs import get_logger
from stretto.members.ballots import Deliver, KeeperCore, VotePolicy
from stretto.members.view import Member, View
from stretto.members.wire import (
    JOINS_VARIABLE,
    MEMBER_VARIABLE,
    SOCKET_VARIABLE,
    view_message,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.members.ballots import Command

_log = get_logger(__name__)

TICK_S = 0.1

STOPPED_S = 3.0
"""A rank that a signal has stopped for this long is killed."""

_END_S = 10.0
"""Ranks have this long to end after SIGTERM."""

_MAX_REPLACEMENTS = 16
"""A rank that always fails must not be started forever."""

_KEEPER = 0
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What a keeper runs."""

    command: tuple[str, ...]
    """One rank's program and arguments."""

    ranks: int
    """Ranks to start with."""

    min_ranks: int
    """The job fails when fewer are left."""

    max_ranks: int

    replaces: bool = True
    """Whether to start a rank in place of a lost one."""


@final
class _Rank:
    """A rank's process."""

    def __init__(
        self, member: int, local_rank: int, process: Any, *, joins: bool
    ) -> None:
        self.member, self.local_rank, self.joins = member, local_rank, joins
        self.process: subprocess.Popen[bytes] = process
        self.channel: Channel | None = None
        self.left = False
        self.has_entered = False
        self.is_stopped = False
        self.code: int | None = None


@final
class RankKeeper:
    """Runs one job's ranks on this host."""

    def __init__(self, job: ElasticJob) -> None:
        """Prepare; `run` starts the ranks."""
        self._job = job
        first = View(
            generation=0,
            members=tuple(Member(id=i, keeper=_KEEPER) for i in range(job.ranks)),
        )
        policy = VotePolicy(min_ranks=job.min_ranks, max_ranks=job.max_ranks)
        self._core = KeeperCore(_KEEPER, (), first, policy)
        self._loop = Loop()
        self._ranks: dict[int, _Rank] = {}
        self._next = job.ranks
        self._replacements = 0
        self._code = 0
        self._ends = False
        self._folder = Path()

    def run(self) -> int:
        """Run the job to its end; return its exit status, as a shell's."""
        self._folder = Path(tempfile.mkdtemp(prefix="stretto-"))  # mode 0700
        listener = Listener(
            self._loop,
            listening(self._folder / "keeper"),
            self._on_message,
            self._on_close,
        )
        self._loop.on_signals(
            {
                signal.SIGCHLD: self._reap,
                signal.SIGTERM: lambda: self._end(128 + signal.SIGTERM),
                signal.SIGINT: lambda: self._end(128 + signal.SIGINT),
            }
        )
        self._loop.every(TICK_S, self._tick)
        try:
            port = free_port()
            for member in range(self._job.ranks):
                self._start(
                    member, member, rank=member, size=self._job.ranks, port=port
                )
            self._loop.run()
        finally:
            for rank in self._ranks.values():
                if rank.code is None:
                    rank.process.kill()
            listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._code

    # ranks

    def _start(
        self,
        member: int,
        local_rank: int,
        *,
        rank: int,
        size: int,
        port: int,
        joins: bool = False,
    ) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._job.ranks),
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": str(port),
            SOCKET_VARIABLE: str(self._folder / "keeper"),
            MEMBER_VARIABLE: str(member),
        }
        if size > 1 or joins:
            environment.setdefault("OMP_NUM_THREADS", "1")
        environment.pop(JOINS_VARIABLE, None)
        if joins:
            environment[JOINS_VARIABLE] = "1"
        process = subprocess.Popen(
            self._job.command,
            env=environment,
            preexec_fn=syscalls.die_with_parent,
        )
        self._ranks[member] = _Rank(member, local_rank, process, joins=joins)

    def _reap(self) -> None:
        for rank in list(self._ranks.values()):
            if rank.code is None:
                self._look_at(rank)

    def _look_at(self, rank: _Rank) -> None:
        options = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while (found := os.waitid(os.P_PID, rank.process.pid, options)) is not None:
            if found.si_code == os.CLD_STOPPED:
                rank.is_stopped = True
                self._loop.call_in(STOPPED_S, lambda: self._kill_stopped(rank))
            elif found.si_code == os.CLD_CONTINUED:
                rank.is_stopped = False
            else:
                status = found.si_status
                rank.code = status if found.si_code == os.CLD_EXITED else -status
                rank.process.returncode = rank.code
                self._ended(rank)
                return

    def _kill_stopped(self, rank: _Rank) -> None:
        if rank.is_stopped and rank.code is None:
            _log.warning(
                "%s has been stopped for %g s: it is killed", _name(rank), STOPPED_S
            )
            rank.process.kill()

    def _ended(self, rank: _Rank) -> None:
        code = rank.code or 0
        was_lost = code != 0 and not rank.left
        if code == 0 and not rank.left:
            self._leave(rank)
        if code != 0 and not (rank.joins and rank.left):
            how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
            _log.warning("%s ended with %s", _name(rank), how)
        if rank.left and code != 0 and not rank.joins:
            self._code = self._code or _shell_code(code)
        living = [r for r in self._ranks.values() if r.code is None]
        if was_lost and not self._ends:
            trained = self._core.view.generation > 0
            self._execute(self._core.ended(rank.member, now_s()))
            if not trained:  # ranks may wait for it where nothing ends their wait
                self._end(_shell_code(code))
            else:
                self._replace(rank)
                living = [r for r in self._ranks.values() if r.code is None]
                leaving = any(r.left for r in self._ranks.values())
                if len(living) < self._job.min_ranks and not leaving:
                    _log.error(
                        "%d ranks are left, of at least %d: the job ends",
                        len(living),
                        self._job.min_ranks,
                    )
                    self._end(_shell_code(code))
        if not living:
            self._loop.stop()

    def _replace(self, lost: _Rank) -> None:
        """Start a rank in place of a lost one, unless the job ends or it is in vain."""
        is_ending = any(rank.left for rank in self._ranks.values())
        if not self._job.replaces or is_ending:
            return
        if self._replacements == _MAX_REPLACEMENTS:
            _log.error("%d ranks were replaced: no more are", _MAX_REPLACEMENTS)
            return
        self._replacements += 1
        member, self._next = self._next, self._next + 1
        self._start(
            member, lost.local_rank, rank=0, size=1, port=free_port(), joins=True
        )
        _log.warning("member %d is started in its place", member)

    def _end(self, code: int) -> None:
        """End all ranks, and the job with this status."""
        if self._ends:
            return
        self._ends = True
        self._code = code
        for rank in self._ranks.values():
            if rank.code is None:
                rank.process.terminate()
        self._loop.call_in(_END_S, self._kill_all)
        if all(rank.code is not None for rank in self._ranks.values()):
            self._loop.stop()

    def _kill_all(self) -> None:
        for rank in self._ranks.values():
            if rank.code is None:
                rank.process.kill()

    # messages

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> None:
        now = now_s()
        match message:
            case {"ready": int(member), "address": str(address)}:
                rank = self._ranks.get(member)
                if rank is None or rank.code is not None or rank.channel is not None:
                    channel.close()
                    return
                rank.channel, channel.peer = channel, rank
                row = Member(id=member, keeper=_KEEPER, address=address)
                self._execute(self._core.ready(row, now))
            case {"failed": int(generation)}:
                if generation < self._core.view.generation:
                    self._tell({"end": generation})  # others may still wait in it
                self._execute(self._core.failed(generation, now))
            case {"entered": int()} if channel.peer is not None:
                channel.peer.has_entered = True
            case {"left": int()} if channel.peer is not None:
                self._leave(channel.peer)
            case _:
                channel.close()

    def _on_close(self, channel: Channel) -> None:
        if channel.peer is not None:
            channel.peer.channel = None

    def _tick(self) -> None:
        self._execute(self._core.tick(now_s()))

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self._deliver(command.view)

    def _deliver(self, view: View) -> None:
        if self._ends:
            return
        level = logging.INFO if view.generation == 1 else logging.WARNING
        ids = ", ".join(map(str, view.ids))
        _log.log(level, "membership %d: members %s", view.generation, ids)
        self._tell(view_message(view))

    def _tell(self, message: dict[str, Any]) -> None:
        for rank in self._ranks.values():
            if rank.channel is not None:
                rank.channel.send(message)

    def _leave(self, rank: _Rank) -> None:
        """A rank has finished: the job ends, so those that would join do too."""
        rank.left = True
        self._execute(self._core.left(rank.member, now_s()))
        for other in self._ranks.values():
            if other.joins and not other.has_entered and other.code is None:
                other.left = True
                self._execute(self._core.left(other.member, now_s()))
                other.process.kill()


def _name(rank: _Rank) -> str:
    return f"member {rank.member} (process {rank.process.pid})"


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
