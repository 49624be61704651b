"""Start and end, and a rank's place among all."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import StrettoError
from stretto.horovod import environment, timeline
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.torch import meeting, topology
from stretto.horovod.torch.process_sets import ProcessSet, global_process_set
from stretto.runtime.agreement import Agreement
from stretto.runtime.negotiated import Engine, EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.horovod.environment import Settings
    from stretto.horovod.torch.topology import Topology
    from stretto.runtime.agreement import Ranks

_log = logging.getLogger(__name__)

_LEAVE_S = 5.0

DYNAMIC = "dynamic"


@dataclass(slots=True)
class Member:
    """A process set that this rank is in."""

    process_set_id: int
    ranks: tuple[int, ...]
    """Global ranks."""
    engine: Engine
    numbered: dict[str, int] = field(default_factory=dict)
    """Unnamed operations so far, by kind."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@final
class World:
    """What lies between `init` and `shutdown`."""

    def __init__(self, ranks: Ranks, group: Any, settings: Settings) -> None:
        self.ranks = ranks
        self.settings = settings
        self.dynamic = settings.dynamic_process_sets
        self._group = group
        self._agreement = Agreement(
            dataclasses.replace(ranks, store=PrefixStore("world", ranks.store))
        )
        self._members: dict[int, Member] = {}
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._sets: dict[int, list[ProcessSet]] = {}
        self._next_id = 0
        self.topology: Topology | None = None

    # Process sets.

    def member(self, process_set: ProcessSet) -> Member:
        """What this rank runs a set's operations with.

        Raises:
            ValueError: the set is not added, or this rank is not in it.
        """
        number = process_set.process_set_id
        found = None if number is None else self._members.get(number)
        if found is not None:
            return found
        if number is None or number not in self._ranks_of:
            raise ValueError(
                f"{process_set} is not added: give it to init(process_sets=[...]) or "
                "to add_process_set()"
            )
        raise ValueError(
            f"rank {self.ranks.rank} is not in {process_set}: only its ranks may call "
            "operations of it"
        )

    def add(self, process_set: ProcessSet) -> None:
        """Adds a set; every rank must, in the same order.

        Raises:
            ValueError: it is there already, or has ranks that are not there.
        """
        ranks = tuple(process_set.ranks or ())
        size = self.ranks.size
        trouble = None
        if not ranks and self._ranks_of:
            trouble = "a process set needs at least one rank"
        elif any(rank >= size for rank in ranks):
            trouble = f"a process set's ranks must be below {size}, got {list(ranks)}"
        elif ranks in self._ranks_of.values():
            trouble = f"a process set of ranks {list(ranks)} was added already"
        if trouble is not None:
            raise ValueError(trouble)
        number, self._next_id = self._next_id, self._next_id + 1
        self._ranks_of[number] = ranks
        self._sets[number] = [process_set]
        if self.ranks.rank in ranks:
            self._members[number] = self._open(number, ranks)
        process_set.added(number, ranks, self.ranks.rank)

    def alias(self, process_set: ProcessSet) -> bool:
        """Whether there is a set of these ranks: then this is another name for it."""
        for number, ranks in self._ranks_of.items():
            if ranks == tuple(process_set.ranks or ()):
                self._sets[number].append(process_set)
                process_set.added(number, ranks, self.ranks.rank)
                return True
        return False

    def agree(self, purpose: str, what: str) -> None:
        """Requires that all ranks do the same now.

        Raises:
            HorovodInternalError: they do not, or a rank does not come.
        """
        if self.ranks.size == 1:
            return
        try:
            self._agreement.require_same(purpose, {"settings": what})
        except StrettoError as exc:
            raise HorovodInternalError(str(exc)) from exc

    def remove(self, number: int) -> None:
        """Ends a set; every rank must."""
        member = self._members.pop(number, None)
        if member is not None:
            _close(member.engine)
        del self._ranks_of[number]
        for known in self._sets.pop(number):
            known.invalidate()

    def knows(self, process_set: ProcessSet) -> bool:
        """Whether a set is added here."""
        return process_set in self._sets.get(process_set.process_set_id or 0, [])

    def _open(self, number: int, ranks: tuple[int, ...]) -> Member:
        whole = self.ranks
        place = dataclasses.replace(
            whole,
            rank=ranks.index(whole.rank),
            size=len(ranks),
            names=tuple(whole.names[rank] for rank in ranks),
            store=PrefixStore(f"set/{number}", whole.store),
        )
        defaults = EngineOptions()
        given = self.settings
        options = EngineOptions(
            **{
                name: getattr(defaults if value is None else given, name)
                for name in (
                    *("lanes", "unit_bytes", "cycle_s", "stall_s"),
                    "known_requests",
                )
                for value in [getattr(given, name)]
            }
        )
        engine = Engine(
            place, options=options, observer=timeline.engine_observer(number)
        )
        return Member(number, ranks, engine)

    # The end.

    def close(self) -> None:
        """Ends engines, and the process group that was made for them."""
        for number in sorted(self._members, reverse=True):
            _close(self._members[number].engine)
        for sets in self._sets.values():
            for process_set in sets:
                if process_set is not global_process_set:
                    process_set.left()
        self._members.clear()
        meeting.part(self._group)


def _close(engine: Engine) -> None:
    # Who leaves first ends connections that others may still wait on, so all leave
    # together; a rank that does not come is not waited for long.
    with contextlib.suppress(StrettoError):
        engine.barrier("end of the process set").wait(_LEAVE_S)
    engine.close()


_world: World | None = None
_lock = threading.RLock()
_told_unknown = False


def current() -> World:
    """The world that `init` made.

    Raises:
        ValueError: there is none.
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized: call hvd.init() first")
    return _world


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the job's ranks; waits for all of them. A second call does nothing.

    Uses the process group that `torch.distributed` has; without one, makes one from
    what torchrun, ``stretto run`` or variables named HOROVOD_ say. A process without a
    launcher is a job of one rank.

    Args:
        comm: The ranks that take part, of the job's; none or empty: all. Only these may
            call it.
        process_sets: Sets to add, in the same order on every rank; two of the same
            ranks are one. Or ``"dynamic"``: they may be added later, as with
            HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Raises:
        ValueError: an argument or a variable breaks its rule.
        HorovodInternalError: ranks came with different settings or process sets, or a
            rank did not come.
    """
    global _world
    with _lock:
        if _world is not None:
            return
        _tell_unknown()
        if comm is not None and not isinstance(comm, list | tuple | range):
            raise ValueError(
                "init: comm must be a list of ranks, got "
                f"{type(comm).__name__}. MPI communicators are not supported."
            )
        if isinstance(process_sets, str) and process_sets.lower() != DYNAMIC:
            raise ValueError(
                f"init: process_sets must be a list of sets or {DYNAMIC!r}, got "
                f"{process_sets!r}"
            )
        place = environment.place(os.environ)
        settings = environment.settings(os.environ)
        if isinstance(process_sets, str):
            settings = dataclasses.replace(settings, dynamic_process_sets=True)
            process_sets = None
        try:
            ranks, group = meeting.meet(
                place,
                members=list(comm) if comm else None,
                timeout_s=settings.timeout_s,
            )
        except StrettoError as exc:
            raise HorovodInternalError(str(exc)) from exc
        world = World(ranks, group, settings)
        try:
            world.topology = topology.exchange(ranks, place)
            _add_sets(world, list(process_sets or ()))
        except StrettoError as exc:
            world.close()
            raise HorovodInternalError(str(exc)) from exc
        except BaseException:
            world.close()
            raise
        _world = world
    atexit.register(shutdown)
    if settings.timeline is not None:
        timeline.start_timeline(settings.timeline, settings.mark_cycles)


def _add_sets(world: World, process_sets: list[ProcessSet]) -> None:
    global_process_set.ranks = list(range(world.ranks.size))
    world.agree("call init()", "; ".join(str(s.ranks) for s in process_sets))
    world.add(global_process_set)
    for process_set in process_sets:
        if not world.alias(process_set):
            world.add(process_set)


def _tell_unknown() -> None:
    global _told_unknown
    names = environment.unknown(os.environ)
    if names and not _told_unknown:
        _told_unknown = True
        _log.warning("these variables have no effect: %s", ", ".join(names))


def shutdown() -> None:
    """Leaves the job: ends connections and threads; nothing without `init`.

    All ranks should call it. What is under way on others fails there with
    `HorovodInternalError`. A process group that was there before `init` stays.
    """
    global _world
    with _lock:
        world, _world = _world, None
        if world is None:
            return
        atexit.unregister(shutdown)
        timeline.stop_timeline()
        world.close()
        del world
    # The engines' parts refer to each other: their connections to the store end with
    # them, now and not at some later collection.
    gc.collect()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _world is not None


def rank() -> int:
    """This process's number among all, from 0.

    Raises:
        ValueError: `init` was not called. So do all that follow.
    """
    return current().ranks.rank


def size() -> int:
    """Number of ranks."""
    return current().ranks.size


def _topology() -> Topology:
    found = current().topology
    if found is None:
        raise AssertionError("a world has a topology once init() has returned")
    return found


def local_rank() -> int:
    """This process's number among those of its host."""
    return _topology().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return _topology().local_size


def cross_rank() -> int:
    """Number of this host among those that have a rank of this local rank."""
    return _topology().cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank of this local rank."""
    return _topology().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return _topology().is_homogeneous


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Adds a process set; every rank must call it, with the same ranks.

    Returns:
        The set that was given, or one made of the ranks that were given.

    Raises:
        ValueError: sets are not dynamic, or there is one of these ranks already.
        HorovodInternalError: ranks came with different sets, or a rank did not come.
    """
    world = current()
    _require_dynamic(world, "add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    world.agree("add a process set", str(process_set.ranks))
    try:
        world.add(process_set)
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set; every rank must call it.

    Returns:
        Whether it was removed: the global set is not, nor one that is not added.

    Raises:
        ValueError: sets are not dynamic.
        HorovodInternalError: ranks came with different sets, or a rank did not come.
    """
    world = current()
    _require_dynamic(world, "remove_process_set")
    number = process_set.process_set_id
    if not number or not world.knows(process_set):
        return False
    world.agree("remove a process set", str(process_set))
    world.remove(number)
    return True


def _require_dynamic(world: World, what: str) -> None:
    if not world.dynamic:
        raise ValueError(
            f"{what}: process sets are static in this job. Set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1, or call init(process_sets='dynamic')."
        )
