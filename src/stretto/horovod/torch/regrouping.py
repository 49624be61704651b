"""Follow a job's memberships in the same process, under ``stretto run --elastic``.

# Note [Whose state counts]
A commit saves the state on every rank before it makes its one collective. So if it has
returned on any rank, all have saved it, and rank 0's last commit is never older than
one that has returned. All ranks can therefore restore their own last commit and then
take rank 0's: nothing is lost that a program could know to be committed, and all are
equal, whatever each had saved. Rank 0 has trained longest: a view keeps the order of
its predecessor, and ranks that join or return come last. Such ranks have no state that
counts. Only if all that trained are lost is another rank's state taken, or a file's.
"""

from __future__ import annotations

import enum
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from stretto import variable_names
from stretto.errors import CommTimeout, RankDisagreement, SpecError, StrettoError
from stretto.horovod import environment, world
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.torch.functions import allgather_object
from stretto.logs import get_logger
from stretto.members.client import MemberClient
from stretto.members.view import View, why_over
from stretto.runtime.failure import forget_frames
from stretto.runtime.presence import is_communication_error
from stretto.runtime.ranks import timeout_of
from stretto.runtime.regroup import AbstractMemberGroup

if TYPE_CHECKING:
    from datetime import timedelta

    from stretto.horovod.process_sets import ProcessSet

_log = get_logger(__name__)

_PATIENCE_S = 1800.0
"""How long to wait for a membership: as long as ranks may take to start."""


def is_loss(error: BaseException) -> bool:
    """Return whether training may continue after an error, with a new membership."""
    if isinstance(error, SpecError | RankDisagreement):
        return False
    return isinstance(error, HorovodInternalError | CommTimeout | dist.DistError) or (
        isinstance(error, RuntimeError) and is_communication_error(error)
    )


class _State(enum.IntEnum):
    """The standing of a rank's state: see Note [Whose state counts]."""

    NONE = 0
    """It has not trained yet."""
    STALE = 1
    """The others have trained without it."""
    TRAINED = 2


@final
class _WorldGroup(AbstractMemberGroup):
    """The groups of `stretto.horovod.world`."""

    def __init__(self, *, host: str, timeout: timedelta) -> None:
        super().__init__(host=host, timeout=timeout)

    def _leave(self) -> list[Any]:
        if not dist.is_initialized():
            return []
        return [dist.distributed_c10d._get_default_group()]  # noqa: SLF001

    def _abort(self) -> None:
        world.abort(CommTimeout("the ranks of this job have changed: one is lost"))


_job: JobRanks | None = None


@final
class JobRanks:
    """The ranks of the job that this process trains with, one membership at a time."""

    def __init__(self, client: MemberClient) -> None:
        self._client = client
        settings = environment.settings(os.environ)
        timeout_s = settings.timeout_s or default_pg_timeout.total_seconds()
        self._group = _WorldGroup(
            host=os.environ.get(variable_names.HOST_ADDRESS, "127.0.0.1"),
            timeout=timeout_of(timeout_s),
        )
        self._view: View | None = None
        self._is_following = False
        self._state = _State.NONE
        self._settings = settings
        self.joins = client.joins
        """Whether the job trained before this process was started."""

        self.root = 0
        """The rank whose state all take."""

        self.serial = -1
        """The number of that rank's last commit."""

        self.have_state = False
        """Whether any rank has trained."""

        self.is_smaller = False
        """Whether the last change has removed a rank."""

    @classmethod
    def of_process(cls) -> JobRanks | None:
        """Return this process's, or ``None`` without ``stretto run --elastic``."""
        global _job
        if _job is None:
            client = MemberClient.of_environment()
            _job = None if client is None else cls(client)
        return _job

    def begin(self, serial: int) -> None:
        """Join the other ranks, unless this process has; collective.

        Args:
            serial: The number of this rank's last commit.

        Raises:
            SpecError: `init` was called with some of the ranks only.
            StrettoError: ranks do not start, or differ.
        """
        if self._view is not None:
            return
        now = world.current()
        place = environment.place(os.environ)
        if place is not None and place.size != now.ranks.size:
            raise SpecError(
                f"hvd.elastic.run needs all {place.size} ranks of the job, but "
                f"hvd.init(comm=...) has {now.ranks.size}: call hvd.init() without it"
            )
        if now.has_sent and now.ranks.rank == 0:
            _log.warning(
                "collectives were called before the function of hvd.elastic.run: a "
                "rank that joins later can't take part in them, and ends. Move them "
                "into the function, or what they send into the state."
            )
        self._settings = now.settings
        self._client.start(
            self._group.address,
            on_view=self._on_view,
            on_end=self._group.end,
            # Nothing is lost that was committed.
            on_drain=partial(os.kill, os.getpid(), signal.SIGTERM),
        )
        self._follow(None, serial, now.added)

    def has_news(self) -> bool:
        """Return whether there is a membership that this process has not followed."""
        newest = self._client.newest
        return newest is not None and newest.generation > self._group.generation

    def has_synced(self) -> None:
        """This rank has the state of the others."""
        self._state = _State.TRAINED

    def change(self, serial: int, *, is_known: bool) -> None:
        """Follow a new membership; all ranks must, after the same collective.

        Args:
            serial: The number of this rank's last commit.
            is_known: Whether a rank knows that there is one. Otherwise one of the same
                ranks is asked for.
        """
        generation = self._group.generation
        world.leave(None)
        if not is_known:
            self._client.failed(generation)
        self._follow(None, serial)

    def recover(self, error: BaseException, serial: int) -> None:
        """Follow the next membership after a failure.

        Args:
            error: What has failed.
            serial: The number of this rank's last commit.
        """
        generation = self._group.generation
        _log.info("membership %d has ended: %s", generation, _line(error))
        self._group.end(generation)
        self._client.failed(generation)
        self._follow(error, serial)

    def _on_view(self, view: View) -> None:
        """End what waits in earlier generations; another thread calls this."""
        # Others may leave out a generation that this rank enters, and never answer.
        if self._is_following or not view.keeps(self._view):
            self._group.end(view.generation - 1)

    def _follow(
        self,
        error: BaseException | None,
        serial: int,
        process_sets: list[ProcessSet] | None = None,
    ) -> None:
        """Enter the newest membership; again, if ranks are lost meanwhile."""
        client, group = self._client, self._group
        self._is_following = True
        world.leave(_as_stretto(error))
        while True:
            view = client.next_view(group.generation, timeout_s=_PATIENCE_S)
            if view.rank(client.member) is None:
                self._wait_for_return(view)
                continue
            try:
                # Sets of the ranks that were launched; later ones are others.
                sets = process_sets if view.generation == 1 else None
                self._enter(view, serial, sets or [])
            except (RuntimeError, StrettoError) as exc:
                world.leave(_as_stretto(exc))
                if not is_loss(exc) or isinstance(exc.__cause__, RankDisagreement):
                    raise
                why = why_over(view, client.newest, exc, has_ended=group.has_ended)
                _log.info("membership %d was lost: %s", view.generation, why)
                client.failed(view.generation)
                forget_frames(exc)
            else:
                self._is_following = False
                return
            finally:
                group.built()

    def _wait_for_return(self, view: View) -> None:
        """Ask to join again, after a membership without this rank."""
        _log.warning(
            "member %d was not reached by the others, which train as membership %d: it "
            "asks to join them again",
            self._client.member,
            view.generation,
        )
        self._group.skip(view.generation)
        self._state = min(self._state, _State.STALE)
        self._client.ready(self._group.address)

    def _enter(self, view: View, serial: int, process_sets: list[ProcessSet]) -> None:
        client, group = self._client, self._group
        rank, size = view.ids.index(client.member), len(view.members)
        group.enter(view.generation, rank, size, view.members[0].address)
        membership = world.MembershipCallbacks(
            is_over=group.is_over(),
            on_loss=partial(client.failed, view.generation),
            opening=group.opening,
        )
        world.rejoin(self._settings, membership, process_sets)
        # This opens the engine's lanes, too: sockets that are opened later would not be
        # known to what ends the membership.
        notes = allgather_object([int(self._state), serial], name="elastic.note")
        group.require_current()
        best = max(state for state, _ in notes)
        self.have_state = best > _State.NONE
        self.root = [state for state, _ in notes].index(best)
        self.serial = notes[self.root][1]
        before = () if self._view is None else self._view.ids
        self.is_smaller = not set(before) <= set(view.ids)
        self._view = view
        client.entered(view.generation)
        if before and rank == 0:
            _log.warning(
                "membership %d: %d ranks train (before: %d)",
                view.generation,
                size,
                len(before),
            )
        if self.root and rank == 0:
            _log.warning("all ranks take the state of rank %d", self.root)


def _line(error: BaseException) -> str:
    """Return an error without the stacks that torch adds."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _as_stretto(error: BaseException | None) -> StrettoError | None:
    """Return an error as one that ends operations."""
    if error is None or isinstance(error, StrettoError):
        return error
    return CommTimeout(str(error))
