"""The keeper: starts a host's ranks, sees them end, and gives the others a new view.

It is a process of its own without torch, so that it answers within milliseconds
whatever the ranks compute. Ranks are its children and end with it.

`KeeperCore` decides, alone or with the keepers of other hosts (`peers`). Every keeper
starts and sees the ranks of its host only.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import step_counts, variable_names
from stretto.cluster.channel import Channel, Listener, listening
from stretto.cluster.loop import Loop, now_s
from stretto.errors import StrettoError
from stretto.lab import syscalls
from stretto.lab.ports import free_port
from stretto.logs import get_logger
from stretto.members import progress
from stretto.members.ballots import Deliver, KeeperCore, VotePolicy
from stretto.members.launchers import AGENT_STORE_VARIABLE, Launcher, launcher_of
from stretto.members.meeting import Book, MeetingPoint
from stretto.members.peers import KeeperNetwork
from stretto.members.progress import ProgressReader
from stretto.members.view import Member, View
from stretto.members.wire import (
    view_message,
)
from stretto.step_counts import StepCounter, StepCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cluster.loop import Timer
    from stretto.members.ballots import Command, Message

_log = get_logger(__name__)

TICK_S = 0.1

_STACKS_S = 0.5
"""A rank that hangs has this long to print where before it is killed."""

STOPPED_S = 3.0
"""A rank that a signal has stopped for this long is killed."""

_END_S = 10.0
"""Ranks have this long to end after SIGTERM."""

_CONFIRM_S = 5.0
"""Other hosts have this long to confirm that the job is over."""

_DRAIN_S = 300.0
"""Ranks have this long to leave between two steps, and to write a snapshot."""

_AGAIN_S = 1.0
"""A second SIGTERM after this time ends all ranks at once."""

_MAX_REPLACEMENTS = 16
"""A rank that always fails must not be started forever."""

_ERRORS = 3
"""Ranks that fail by an error of their own, in one step, in their first steps or before
they have joined, until none is started in their place."""

_FIRST_STEPS = 3
"""Steps that a rank that joins must end, or its error counts as one of the first."""

_NUMBERS = 10_000
"""Members that a keeper starts later have ids from its number times this on."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """The job that a keeper runs."""

    command: tuple[str, ...]
    """One rank's program and arguments."""

    ranks: int
    """Ranks to start with on this host."""

    min_ranks: int
    """The job fails when fewer are left."""

    max_ranks: int

    replaces: bool = True
    """Whether to start a rank in place of a lost one."""

    meeting: MeetingPoint | None = None
    """Where to meet the keepers of other hosts, if there are any."""

    local_rank: int = 0
    """The local rank of this keeper's first one, beside other keepers on its host."""

    local_size: int | None = None
    """Ranks on this host, if other keepers start some of them."""


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
        self.has_said_so = False
        """Whether it has said itself that it has finished training."""

        self.has_entered = False
        self.drains = False
        self.is_drained = self.is_condemned = False
        self.stopped: Timer | None = None
        self.counts: StepCounts | None = None
        self.slot = 0
        self.page: ProgressReader | None = None
        self.step = 0
        """The number of the job's step that it was in last, if it said one."""

        self.num_ended = 0
        """The number of steps that it had ended when it ended."""

        self.code: int | None = None

    def signal(self, number: int) -> None:
        """Signal the process, unless its end is known.

        Popen's own methods would take the end of a process away from `RankKeeper`.
        """
        if self.code is None:
            os.kill(self.process.pid, number)

    def close(self) -> None:
        """Unmap what it has shared."""
        if self.counts is not None:
            self.num_ended = self.steps()
            self.counts.close()
        self.note_step()
        if self.page is not None:
            self.page.close()
        self.counts = self.page = None

    def note_step(self) -> None:
        """Note the job's step that it is in."""
        if self.page is not None:
            self.step = self.page.read().steps

    def steps(self) -> int:
        """Return how many steps it has ended."""
        return 0 if self.counts is None else self.counts.read(self.slot).steps


@final
class RankKeeper:
    """Runs one job's ranks on this host."""

    def __init__(self, job: ElasticJob) -> None:
        """Prepare; `run` starts the ranks."""
        self._job = job
        self._policy = VotePolicy(min_ranks=job.min_ranks, max_ranks=job.max_ranks)
        self._loop = Loop()
        self._network: KeeperNetwork | None = None
        self._core: KeeperCore | None = None
        self._keeper = 0
        self._ranks: dict[int, _Rank] = {}
        self._next = 0
        self._replacements = self._unjoined = self._errors = self._failed_step = 0
        self._failed_early = 0
        self._code = 0
        self._ends = self._waits = False
        self._confirmed: set[int] | None = None
        """Hosts that know that the job is over, once this one has announced it."""
        self._drained_s: float | None = None
        self._counter = _counter()
        self._steps = 0
        self._error: StrettoError | None = None
        self._first: int | None = None
        """The member that is rank 0 of the membership that was entered last."""

        self._lost_first: _Rank | None = None
        """The lost rank 0 of a membership that no other one has followed."""

        self._sent_away: list[_Rank] = []
        """Ranks that were ended before they joined, because others had finished."""

        self._small = 0
        """The last membership that was ended because it had too few ranks."""

        self._folder = Path()

    def run(self) -> int:
        """Run the job to its end; return its exit status, as a shell's.

        Raises:
            StrettoError: the hosts don't meet, or this one's address can't be used.
        """
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
                signal.SIGTERM: self._drain,
                signal.SIGINT: lambda: self._end(128 + signal.SIGINT),
            }
        )
        try:
            if self._job.meeting is None:
                members = tuple(Member(id=i, keeper=0) for i in range(self._job.ranks))
                first = View(generation=0, members=members)
                self._form(0, (), first, _LOOPBACK, free_port())
            else:
                self._network = self._meeting(self._job.meeting)
            self._loop.run()
        finally:
            for rank in self._ranks.values():
                if rank.code is None:
                    rank.signal(signal.SIGKILL)
            listener.close()
            if self._network is not None:
                self._network.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._error is not None:
            raise self._error
        return self._code

    # hosts

    def _meeting(self, point: MeetingPoint) -> KeeperNetwork:
        job = self._job
        return KeeperNetwork(
            self._loop,
            point,
            ranks=job.ranks,
            limits=f"--elastic {job.min_ranks}:{job.max_ranks}",
            ranks_port=free_port(),
            view=self._present_view,
            on_formed=self._on_formed,
            on_met=self._on_met,
            on_message=self._on_keeper,
            on_other=self._on_other,
            on_failed=self._on_failed,
        )

    def _present_view(self) -> View | None:
        """Return the view that a host may join, or ``None`` before training."""
        core = self._core
        return core.view if core is not None and core.view.generation else None

    def _on_formed(self, book: Book) -> None:
        """The keepers have met, or this one has joined those that run."""
        places = book.places
        others = [p.keeper for p in places if p.keeper != book.keeper]
        first = book.view
        if first is None:
            keepers = [p.keeper for p in places for _ in range(p.ranks)]
            members = tuple(Member(id=i, keeper=k) for i, k in enumerate(keepers))
            first = View(generation=0, members=members)
            if not self._job.min_ranks <= len(members) <= self._job.max_ranks:
                self._on_failed(
                    f"{len(members)} ranks on {len(places)} hosts are not within "
                    f"--elastic {self._job.min_ranks}:{self._job.max_ranks}"
                )
                return
        _log.info("this is host %d of %d", book.keeper, len(places))
        host = next(p.host for p in places if p.keeper == min(q.keeper for q in places))
        self._form(book.keeper, others, first, host, book.ranks_port)

    def _on_met(self, keeper: int) -> None:
        if self._core is not None:
            self._core.meet(keeper)

    def _on_failed(self, why: str) -> None:
        self._error = StrettoError(why)
        self._end(1)

    def _on_keeper(self, sender: int, message: Message) -> None:
        if self._core is not None:
            self._execute(self._core.receive(sender, message, now_s()))

    def _on_other(self, sender: int, message: dict[str, Any]) -> None:
        match message:
            case {"end": int(generation)}:
                self._tell({"end": generation})
            case {"over": int(code)}:
                if self._network is not None:
                    self._network.confirm(sender, {"confirmed": "over"})
                if self._present_view() is None and not self._ends:
                    _log.error("the job ends, because a rank of host %d failed", sender)
                    self._end(code)
            case {"confirmed": "over"} if self._confirmed is not None:
                self._confirmed.add(sender)
                self._stop_if_confirmed()
            case _:
                pass

    def _form(
        self, keeper: int, others: Sequence[int], first: View, host: str, port: int
    ) -> None:
        """Start this host's ranks."""
        self._keeper = keeper
        self._core = KeeperCore(keeper, others, first, self._policy)
        self._loop.every(TICK_S, self._tick)
        if first.generation == 0:
            mine = [m.id for m in first.members if m.keeper == keeper]
            self._next = len(first.members) if keeper == 0 else keeper * _NUMBERS
            for local_rank, member in enumerate(mine):
                rank = first.rank(member) or 0
                size = len(first.members)
                self._start(member, local_rank, rank=rank, size=size, at=(host, port))
            return
        self._next = keeper * _NUMBERS
        for local_rank in range(self._job.ranks):
            self._start_joining(local_rank)

    # ranks

    def _start(
        self,
        member: int,
        local_rank: int,
        *,
        rank: int,
        size: int,
        at: tuple[str, int],
        joins: bool = False,
    ) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(self._job.local_rank + local_rank),
            "LOCAL_WORLD_SIZE": str(self._job.local_size or self._job.ranks),
            "MASTER_ADDR": at[0],
            "MASTER_PORT": str(at[1]),
            variable_names.HOST_ADDRESS: _LOOPBACK
            if self._network is None
            else self._network.host,
            variable_names.KEEPER: str(self._folder / "keeper"),
            variable_names.MEMBER: str(member),
        }
        if size > 1 or joins:
            environment.setdefault("OMP_NUM_THREADS", "1")
        steps = self._folder / f"steps-{member}"
        step_counts.create(steps, rank + 1)
        environment[variable_names.STEP_COUNTS] = str(steps)
        page = self._folder / f"progress-{member}"
        progress.create(page)
        environment[variable_names.PROGRESS] = str(page)
        environment.pop(variable_names.MIN_RANKS, None)
        if self._network is None:
            environment[variable_names.MIN_RANKS] = str(self._job.min_ranks)
        environment.pop(variable_names.JOINS, None)
        environment.pop(AGENT_STORE_VARIABLE, None)  # rank 0 serves its store here
        if joins:
            environment[variable_names.JOINS] = str(self._present_ranks())
        process = subprocess.Popen(
            self._job.command,
            env=environment,
            preexec_fn=functools.partial(syscalls.die_with, os.getpid()),
        )
        made = _Rank(member, local_rank, process, joins=joins)
        made.counts, made.slot = StepCounts(steps), rank
        made.page = ProgressReader(page)
        self._ranks[member] = made

    def _present_ranks(self) -> int:
        """Return how many ranks train, without those of this host that have ended."""
        members = () if self._core is None else self._core.view.ids
        ended = {m for m, rank in self._ranks.items() if rank.code is not None}
        return max(1, len(set(members) - ended))

    def _reap(self) -> None:
        for rank in list(self._ranks.values()):
            if rank.code is None:
                self._look_at(rank)

    def _look_at(self, rank: _Rank) -> None:
        options = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while (found := os.waitid(os.P_PID, rank.process.pid, options)) is not None:
            if found.si_code == os.CLD_STOPPED:
                if rank.stopped is None:
                    rank.stopped = self._loop.call_in(
                        STOPPED_S, lambda: self._kill_stopped(rank)
                    )
            elif found.si_code == os.CLD_CONTINUED:
                if rank.stopped is not None:
                    rank.stopped.cancel()
                rank.stopped = None
            else:
                status = found.si_status
                rank.code = status if found.si_code == os.CLD_EXITED else -status
                rank.process.returncode = rank.code
                rank.close()
                self._ended(rank)
                return

    def _kill_stopped(self, rank: _Rank) -> None:
        if rank.code is None:
            _log.warning(
                "%s has been stopped for %g s: it is killed", _name(rank), STOPPED_S
            )
            rank.signal(signal.SIGKILL)

    def _ended(self, rank: _Rank) -> None:
        code = rank.code or 0
        is_known = rank.left or rank.is_drained
        has_not_joined = rank.joins and not rank.has_entered
        was_lost = not is_known and (code != 0 or has_not_joined)
        if not (is_known or was_lost):
            self._leave(rank)
        if code != 0 and not rank.is_drained and not (rank.joins and rank.left):
            how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
            _log.warning("%s ended with %s", _name(rank), how)
        elif was_lost:
            _log.warning(
                "%s ended with exit status 0 before it had joined the others",
                _name(rank),
            )
        if rank.left and code != 0 and not rank.joins:
            self._code = self._code or _shell_code(code)
        core = self._core
        if was_lost and not self._ends and core is not None:
            self._lose(rank, core)
        living = [r for r in self._ranks.values() if r.code is None]
        if not living:
            # A rank that was asked to leave may be the last one to end.
            is_done = any(r.left and r.code == 0 for r in self._ranks.values())
            first = self._lost_first
            if self._network is None and is_done and first is not None:
                _log.error(
                    "%s was rank 0 and was lost when the others had trained the last "
                    "step: what only rank 0 does after it, such as saving the model, "
                    "may be missing. With checkpoint=, start the job again",
                    _name(first),
                )
                self._code = self._code or _shell_code(first.code or 0)
            if rank.is_drained and not is_done:
                self._code = self._code or self._code_of_leaving(code)
            self._stop_if_done()

    def _lose(self, rank: _Rank, core: KeeperCore) -> None:
        """Replace a rank that is lost, or end the job if too few are left.

        Args:
            rank: has ended while others train.
            core: this host's.
        """
        status = _shell_code(rank.code or 0) or 1
        trained = core.view.generation > 0
        if rank.member == self._first:
            self._lost_first = rank
        self._execute(core.ended_early(rank.member, now_s()))
        if not trained:  # ranks may wait for it where nothing ends their wait
            self._announce_end(status)
            self._end(status)
            return
        ranks = self._ranks.values()
        if self._may_replace(rank):
            self._replace(rank)
        elif not any(each.has_entered and each.code is None for each in ranks):
            self._code = self._code or status
            self._end_newcomers()
            self._sent_away.clear()
        living = [each for each in ranks if each.code is None]
        if not living:
            self._code = self._code or status
        too_few = self._network is None and len(living) < self._job.min_ranks
        if too_few and not core.is_leaving():
            _log.error(
                "%d ranks are left, of at least %d: the job ends",
                len(living),
                self._job.min_ranks,
            )
            self._end(status)

    # See Note [A rank that ends early] in `ballots`.

    def _review_left(self, core: KeeperCore) -> None:
        """Take a rank for lost that ended without an error while others train on."""
        self._note_steps(core)
        if self._ends or self._drained_s is not None:
            return
        if core.waits_for_left():
            _log.error(
                "a rank ended with exit status 0 before all had called "
                "stretto.Elastic, where the others wait for it: the job ends"
            )
            self._announce_end(1)
            self._end(1)
            return
        furthest = core.furthest_step()
        for rank in list(self._ranks.values()):
            ended_well = rank.left and rank.code == 0 and not rank.has_said_so
            if ended_well and 0 < rank.step < furthest and not self._ends:
                _log.warning(
                    "%s ended with exit status 0 in step %d, and others train on: it "
                    "counts as lost",
                    _name(rank),
                    rank.step,
                )
                rank.left = False
                self._lose(rank, core)
        if not core.is_leaving():
            sent_away, self._sent_away = self._sent_away, []
            for rank in sent_away:
                self._execute(core.ended_early(rank.member, now_s()))
                self._replace(rank)

    def _note_steps(self, core: KeeperCore) -> None:
        """Note how far this host's ranks are."""
        living = [
            rank
            for rank in self._ranks.values()
            if rank.code is None and rank.has_entered
        ]
        for rank in living:
            rank.note_step()
        core.step = max((rank.step for rank in living), default=0)

    def _end_small(self, core: KeeperCore, now: float) -> None:
        """Let the ranks of a membership wait that has too few of them.

        They were to finish training, after another rank that then turned out to have
        ended early.
        """
        view = core.view
        if len(view.members) >= self._job.min_ranks or core.is_leaving():
            return
        if self._small < view.generation and not self._ends:
            self._small = view.generation
            self._tell({"end": view.generation})
            self._execute(core.failed(view.generation, now))

    def _code_of_leaving(self, code: int) -> int:
        """Return the keeper's status where all its ranks have left, others train on.

        torchrun would end its other processes, which are keepers, if one failed.
        """
        core = self._core
        others = (
            core is not None
            and self._network is not None
            and self._drained_s is None
            and any(m.keeper != self._keeper for m in core.view.members)
        )
        is_torchrun = launcher_of(os.environ) is Launcher.TORCHRUN
        return 0 if others and is_torchrun else _shell_code(code)

    def _stop_if_done(self) -> None:
        """End once this host's ranks have ended and no other host needs its vote."""
        core, network = self._core, self._network
        if any(rank.code is None for rank in self._ranks.values()):
            return
        if core is None or network is None or self._ends:
            self._stop_if_confirmed()
            return
        core.is_done = True
        mine = any(m.keeper == self._keeper for m in core.view.members)
        others = [k for k in core.view.keepers if k != self._keeper]
        linked = set(core.linked(now_s()))
        # One that ended early is known, and replaced, once the others train on.
        is_out = not mine and not core.has_left()
        if is_out or core.are_done([k for k in others if k in linked]):
            for _ in range(3):  # others may end with this news, without waiting for it
                for keeper in core.peers:
                    network.send(keeper, core.beat(now_s()))
            self._loop.stop()

    # Note [Errors that come again]
    # A signal, such as that of a system out of memory, is a rank's own misfortune. An
    # error that ends a rank with an exit status is often one of the program, and each
    # rank that is started in its place meets it again: before it has joined, or in the
    # same step. A job whose ranks all had one would begin again and end there again.

    def _may_replace(self, lost: _Rank) -> bool:
        """Return whether a rank in the place of a lost one may fare better."""
        if (lost.code or 0) < 0:
            return True
        ranks = self._ranks.values()
        if self._network is None and not any(
            rank.has_entered and rank.code is None for rank in ranks
        ):
            _log.error(
                "the last rank that had trained ended by an error of its own, see "
                "above: the job ends"
            )
            return False
        if not lost.has_entered:
            self._unjoined += 1
            count, what = self._unjoined, "could not join the others"
        elif lost.joins and lost.num_ended < _FIRST_STEPS:
            # The others train on meanwhile, so it is another step of the job each time.
            self._failed_early += 1
            count, what = self._failed_early, "ended in their first steps"
        else:
            self._failed_early = 0
            if not lost.step or lost.step > self._failed_step:
                self._failed_step, self._errors = lost.step, 0
            self._errors += 1
            count, what = self._errors, f"ended in step {lost.step} or before it"
        if count == _ERRORS:
            _log.error(
                "%d ranks %s, each by an error of its own, see above: none is started "
                "in their place",
                count,
                what,
            )
        return count < _ERRORS

    def _replace(self, lost: _Rank) -> None:
        """Start a rank in place of a lost one, if its job still trains."""
        core = self._core
        if not self._job.replaces or core is None or core.is_leaving():
            return
        if self._drained_s is not None:
            return
        if self._replacements == _MAX_REPLACEMENTS:
            _log.error("%d ranks were replaced, which is the limit", _MAX_REPLACEMENTS)
            return
        self._replacements += 1
        member = self._start_joining(lost.local_rank)
        _log.warning("member %d is started in its place", member)

    def _start_joining(self, local_rank: int) -> int:
        """Start a rank of a job that trains; return its id."""
        member, self._next = self._next, self._next + 1
        at = _LOOPBACK, free_port()
        self._start(member, local_rank, rank=0, size=1, at=at, joins=True)
        return member

    def _drain(self) -> None:
        """Let this host's ranks leave between two steps; end them if they don't train.

        Ranks that train are asked by a message: a scheduler may have signaled them.
        """
        core, now = self._core, now_s()
        if self._drained_s is not None and now < self._drained_s + _AGAIN_S:
            return
        code = 128 + signal.SIGTERM
        if self._drained_s is not None or core is None or not core.view.generation:
            self._end(code)
            return
        self._drained_s, self._code = now, code
        _log.warning("this host's ranks leave, because their keeper got SIGTERM")
        waiting = []
        for rank in self._ranks.values():
            if rank.code is None and rank.has_entered and rank.channel is not None:
                rank.channel.send({"drain": True})
            elif rank.code is None:
                rank.is_drained = True
                waiting.append(rank.member)
                rank.signal(signal.SIGKILL)
        self._execute(core.drained(waiting, now))
        self._loop.call_in(_DRAIN_S, lambda: self._end(code))

    def _end(self, code: int) -> None:
        """End all ranks, and the job with this status."""
        if self._ends:
            return
        self._ends = True
        self._code = code
        for rank in self._ranks.values():
            if rank.code is None:  # SIGTERM would only let a rank leave that drains
                rank.signal(signal.SIGKILL if rank.drains else signal.SIGTERM)
        self._loop.call_in(_END_S, self._kill_all)
        if all(rank.code is not None for rank in self._ranks.values()):
            self._stop_if_confirmed()

    def _announce_end(self, code: int) -> None:
        """Tell all hosts that the job is over; a connection may still be to come."""
        if self._network is not None and self._confirmed is None:
            self._confirmed = set()
            self._network.announce({"over": code})
            self._loop.call_in(_CONFIRM_S, self._stop_unconfirmed)

    def _stop_unconfirmed(self) -> None:
        """Stop waiting for other hosts to confirm that the job is over."""
        self._confirmed = None
        if all(rank.code is not None for rank in self._ranks.values()):
            self._loop.stop()

    def _stop_if_confirmed(self) -> None:
        """End once this host's ranks have ended and the others know of an end."""
        if any(rank.code is None for rank in self._ranks.values()):
            return
        confirmed, network = self._confirmed, self._network
        if confirmed is None or network is None or confirmed >= network.others:
            self._loop.stop()

    def _kill_all(self) -> None:
        for rank in self._ranks.values():
            if rank.code is None:
                rank.signal(signal.SIGKILL)

    # messages

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> None:
        now, core = now_s(), self._core
        if core is None:
            channel.close()
            return
        match message:
            case {"ready": int(member), "address": str(address)}:
                rank = self._ranks.get(member)
                if rank is None or rank.code is not None:
                    channel.close()
                    return
                if rank.channel not in (None, channel):
                    channel.close()
                    return
                rank.channel, channel.peer = channel, rank
                row = Member(id=member, keeper=self._keeper, address=address)
                self._execute(core.ready(row, now))
            case {"failed": int(generation)}:
                if generation < core.view.generation:  # others may still wait in it
                    self._tell({"end": generation})
                    if self._network is not None:
                        self._network.send_all({"end": generation})
                self._execute(core.failed(generation, now))
            case {"entered": int(generation)} if channel.peer is not None:
                if generation == core.view.generation:
                    self._first, self._lost_first = core.view.ids[0], None
                if channel.peer.joins and not channel.peer.has_entered:
                    self._unjoined = 0
                channel.peer.has_entered = True
                channel.peer.drains = message.get("drains") is True
            case {"drained": list(members)} if channel.peer is not None:
                mine = [rank for m in members if (rank := self._ranks.get(m))]
                for rank in mine:
                    rank.is_drained = True
                self._execute(core.drained([rank.member for rank in mine], now))
            case {"left": int()} if channel.peer is not None:
                channel.peer.has_said_so = True
                self._leave(channel.peer)
            case _:
                channel.close()

    def _on_close(self, channel: Channel) -> None:
        if channel.peer is not None:
            channel.peer.channel = None

    def _tick(self) -> None:
        core, now = self._core, now_s()
        if core is None:
            return
        self._look_for_hanging(core, now)
        self._review_left(core)
        self._end_small(core, now)
        self._execute(core.tick(now))
        self._report_steps()
        if self._network is None or self._ends:
            return
        if core.view.generation == 0:
            if (lost := core.lost(now)) and not core.is_done:
                name = self._network.name(lost[0])
                self._on_failed(f"{name} was lost before training began")
            return
        self._note_links(core, self._network, now)
        if core.is_leaving():
            self._end_newcomers()
        if all(rank.code is not None for rank in self._ranks.values()):
            self._stop_if_done()

    def _look_for_hanging(self, core: KeeperCore, now: float) -> None:
        """Kill a rank that computes for too long while another waits for long."""
        living = {
            rank: rank.page.read()
            for rank in self._ranks.values()
            if rank.code is None and rank.page is not None and rank.has_entered
        }
        core.waits_long = any(row.waits_long for row in living.values())
        hanging = [rank for rank, row in living.items() if row.hangs]
        if not hanging or not (core.waits_long or core.others_wait(now)):
            return
        for rank in hanging:
            if core.view.rank(rank.member) is None or rank.is_condemned:
                continue
            _log.warning(
                "%s has made no step for %.0f s while others wait: it is killed, after "
                "it has printed where each of its threads is",
                _name(rank),
                living[rank].for_s,
            )
            rank.is_condemned = True
            if rank.channel is not None:
                rank.channel.send({"stacks": True})
            self._loop.call_in(
                _STACKS_S, functools.partial(rank.signal, signal.SIGKILL)
            )

    def _report_steps(self) -> None:
        """Pass the ranks' steps on to who has started this keeper."""
        steps = max((rank.steps() for rank in self._ranks.values()), default=0)
        if self._counter is not None and steps > self._steps:
            self._steps = steps
            self._counter.set(steps)

    def _note_links(self, core: KeeperCore, network: KeeperNetwork, now: float) -> None:
        """Let this host's ranks wait while too few hosts are heard."""
        generation = core.view.generation
        if not core.is_cut_off(now):
            if self._waits:
                _log.warning("this host is linked with the others again")
            self._waits = False
            return
        lost = core.lost(now)
        if not self._waits and lost and not core.are_done(lost):
            self._waits = True
            names = ", ".join(map(network.name, lost))
            _log.warning(
                "no link with %s for %g s: this host's ranks wait until it works "
                "again. If it stays lost, end this command and start it again, on all "
                "hosts that wait",
                names,
                self._policy.silent_s,
            )
            self._tell({"end": generation})

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self._deliver(command.view)
            elif self._network is not None:
                self._network.send(command.to, command.message)

    def _deliver(self, view: View) -> None:
        if self._ends:
            return
        is_first = view.generation == 1 or view.keepers[:1] != (self._keeper,)
        level = logging.INFO if is_first else logging.WARNING
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
        core = self._core
        if core is not None:
            self._note_steps(core)
            if rank.has_entered and not rank.step:  # it has joined after the last step
                rank.step = core.furthest_step()
            self._execute(core.left(rank.member, now_s(), step=rank.step))
        self._end_newcomers()

    def _end_newcomers(self) -> None:
        """End ranks that have not joined yet and would be too late."""
        for other in self._ranks.values():
            is_waiting = other.joins and not other.has_entered and other.code is None
            if is_waiting and not other.left and self._core is not None:
                other.left = True
                self._sent_away.append(other)
                self._execute(self._core.left(other.member, now_s()))
                other.signal(signal.SIGKILL)


def _counter() -> StepCounter | None:
    """Return where this keeper's steps are counted, if anything reads them."""
    path = os.environ.get(variable_names.STEP_COUNTS)
    if not path:
        return None
    try:
        return StepCounter(path, int(os.environ.get("RANK") or "0"))
    except (StrettoError, OSError, ValueError) as error:
        _log.warning("steps are not reported to %s: %s", path, error)
        return None


def _name(rank: _Rank) -> str:
    return f"member {rank.member} (process {rank.process.pid})"


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
