"""Horovod's init and shutdown, rank and size, and process sets: the shared state."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto import variable_names
from stretto.errors import SpecError, StrettoError
from stretto.horovod import environment, meeting, timeline, topology
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.logs import get_logger
from stretto.runtime.agreement import Agreement
from stretto.runtime.negotiated import Engine, EngineOptions
from stretto.runtime.reduction_rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.horovod.environment import HorovodSettings
    from stretto.horovod.topology import Topology
    from stretto.rank_variables import Place
    from stretto.runtime.ranks import Ranks

_log = get_logger(__name__)

_LEAVE_S = 5.0

DYNAMIC = "dynamic"

_ENGINE_OPTIONS = ("lanes", "unit_bytes", "cycle_s", "stall_s", "known_requests")


@dataclass(frozen=True, slots=True)
class UsedOptimizer:
    """A distributed optimizer that has sent gradients."""

    created: int
    """Its index among the optimizers that this process created."""
    names: frozenset[str]
    """The names of its parameters."""
    number: int
    """Distinguishes it from others that have a name in common with it."""


@dataclass(slots=True)
class JoinedSet:
    """A process set that this rank is in."""

    process_set_id: int
    ranks: tuple[int, ...]
    """Global ranks."""
    engine: Engine
    numbered: dict[str, int] = field(default_factory=dict)
    """Number of unnamed operations so far, by kind."""
    optimizers: list[UsedOptimizer] = field(default_factory=list)
    """Distributed optimizers that have sent gradients, in that order."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    rounds: Rounds = field(init=False)
    """Reductions of gradients that other frameworks than PyTorch computed."""

    def __post_init__(self) -> None:
        self.rounds = Rounds(self.engine)


@dataclass(frozen=True, slots=True)
class MembershipCallbacks:
    """Callbacks of a job that continues when ranks are lost."""

    is_over: Callable[[], bool]
    """Whether these ranks have stopped training together."""
    on_loss: Callable[[], None]
    """Called at a failure: the lost rank becomes known elsewhere."""
    opening: Callable[[], AbstractContextManager[None]]
    """A block in which connections are opened, which may have to end meanwhile."""


@final
class World:
    """The state between `init` and `shutdown`."""

    def __init__(
        self,
        ranks: Ranks,
        group: Any,
        settings: HorovodSettings,
        membership: MembershipCallbacks | None = None,
    ) -> None:
        self.ranks = ranks
        self.settings = settings
        self._membership = membership
        self.present: int | None = None
        """How many ranks train, if this one has yet to join them."""
        self.has_sent = False
        """Whether the program has used any set."""
        self.dynamic = settings.dynamic_process_sets
        self._group = group
        self._agreement = Agreement(
            dataclasses.replace(ranks, store=PrefixStore("world", ranks.store))
        )
        self._members: dict[int, JoinedSet] = {}
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._sets: dict[int, list[ProcessSet]] = {}
        self._next_id = 0
        self.topology: Topology | None = None

    # Process sets.

    def member(self, process_set: ProcessSet) -> JoinedSet:
        """Return the member with which this rank runs a set's operations.

        Raises:
            ValueError: the set is not added, or this rank is not in it.
            HorovodInternalError: this rank has yet to join the others.
        """
        if self.present is not None:
            raise HorovodInternalError(
                "this rank joins a job that trains already, so it can't take part in "
                "collectives before the function of hvd.elastic.run is called. Move "
                "the call into that function, or what it sends into the state, which "
                "state.sync() sends to ranks that join."
            )
        self.has_sent = True
        number = process_set.process_set_id
        found = None if number is None else self._members.get(number)
        if found is not None:
            return found
        if number is None or number not in self._ranks_of:
            raise ValueError(
                f"{process_set} is not added: pass it to init(process_sets=[...]) or "
                "to add_process_set()"
            )
        raise ValueError(
            f"rank {self.ranks.rank} is not in {process_set}: only its ranks may call "
            "operations of it"
        )

    def ranks_of(self, process_set_id: int) -> tuple[int, ...]:
        """Return a set's global ranks.

        Raises:
            ValueError: no set has this number.
        """
        if process_set_id not in self._ranks_of:
            raise ValueError(f"no process set has the number {process_set_id}")
        return self._ranks_of[process_set_id]

    def add(self, process_set: ProcessSet) -> None:
        """Add a set; every rank must, in the same order.

        Raises:
            ValueError: it was already added, or contains ranks that do not exist.
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

    def alias_if_known(self, process_set: ProcessSet) -> bool:
        """Return whether a set of these ranks exists; then make this an alias of it."""
        for number, ranks in self._ranks_of.items():
            if ranks == tuple(process_set.ranks or ()):
                self._sets[number].append(process_set)
                process_set.added(number, ranks, self.ranks.rank)
                return True
        return False

    def agree(self, purpose: str, what: str) -> None:
        """Require that all ranks make the same call now.

        Raises:
            HorovodInternalError: they do not, or a rank did not arrive.
        """
        if self.ranks.size == 1:
            return
        try:
            self._agreement.require_same(purpose, {"settings": what})
        except StrettoError as exc:
            raise HorovodInternalError(str(exc)) from exc

    def remove(self, number: int) -> None:
        """End a set; every rank must."""
        member = self._members.pop(number, None)
        if member is not None:
            _close(member.engine)
        del self._ranks_of[number]
        for known in self._sets.pop(number):
            known.invalidate()

    def knows(self, process_set: ProcessSet) -> bool:
        """Return whether a set is added here."""
        return process_set in self._sets.get(process_set.process_set_id or 0, [])

    def _open(self, number: int, ranks: tuple[int, ...]) -> JoinedSet:
        whole = self.ranks
        place = dataclasses.replace(
            whole,
            rank=ranks.index(whole.rank),
            size=len(ranks),
            names=tuple(whole.names[rank] for rank in ranks),
            store=PrefixStore(f"set/{number}", whole.store),
        )
        given = {name: getattr(self.settings, name) for name in _ENGINE_OPTIONS}
        options = EngineOptions(
            **{name: value for name, value in given.items() if value is not None}
        )
        observer, membership = timeline.engine_observer(number), self._membership
        if membership is None:
            engine = Engine(place, options=options, observer=observer)
        else:
            with membership.opening():
                engine = Engine(
                    place,
                    options=options,
                    observer=observer,
                    on_loss=membership.on_loss,
                )
        return JoinedSet(number, ranks, engine)

    @property
    def has_membership(self) -> bool:
        """Whether the job continues when ranks are lost."""
        return self._membership is not None

    @property
    def added(self) -> list[ProcessSet]:
        """The process sets that a program has added, in this order."""
        return [
            process_set
            for sets in self._sets.values()
            for process_set in sets
            if process_set is not global_process_set
        ]

    # Shutdown.

    def close(self) -> None:
        """End engines, and the process group that was made for them."""
        for number in sorted(self._members, reverse=True):
            _close(self._members[number].engine)
        self._part()

    def abort(self, error: StrettoError) -> None:
        """Make everything fail that is under way or comes later; from any thread."""
        for member in tuple(self._members.values()):
            member.engine.abort(error)

    def leave(self, error: StrettoError | None) -> None:
        """Give up the ranks, after a failure if there is an ``error``.

        Connections end in another thread: nothing waits for what may have failed.
        """
        engines = [member.engine for member in self._members.values()]
        if error is None:
            for engine in reversed(engines):
                _await_others(engine)
        else:
            self.abort(error)
        self._part()
        closing = threading.Thread(
            target=_close_all, args=(engines,), name="stretto-leaving", daemon=True
        )
        _closing.add(closing)
        closing.start()

    def _part(self) -> None:
        for process_set in self.added:
            process_set.left()
        self._members.clear()
        meeting.part(self._group)


def _close(engine: Engine) -> None:
    _await_others(engine)
    engine.close()


def _await_others(engine: Engine) -> None:
    # A rank that leaves first ends connections that others may still wait on, so all
    # leave together; the wait for a missing rank is short.
    with contextlib.suppress(StrettoError):
        engine.barrier("end of the process set").wait(_LEAVE_S)


_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _close_all(engines: list[Engine]) -> None:
    for engine in reversed(engines):
        engine.close()


@atexit.register
def _await_closing() -> None:
    """Let engines end before the interpreter does."""
    for thread in tuple(_closing):
        thread.join(_LEAVE_S)


_world: World | None = None
_membership: MembershipCallbacks | None = None
"""The default group's callbacks, once this process has changed its ranks."""
_lock = threading.RLock()
_has_logged_unknown = False


def current() -> World:
    """Return the world that `init` created.

    Raises:
        ValueError: `init` was not called.
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized: call hvd.init() first")
    return _world


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the job's ranks; wait for all of them. A second call does nothing.

    Use the existing process group of `torch.distributed`; without one, create it from
    the variables of torchrun, ``stretto run`` or Horovod's launchers. A process without
    a launcher is a job of one rank.

    Args:
        comm: The participating ranks of the job; ``None`` or empty means all. Only
            these may call it.
        process_sets: Sets to add, in the same order on every rank; two sets with the
            same ranks are one. Or ``"dynamic"``: sets may be added later, as with
            HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Raises:
        ValueError: an argument or a variable breaks its rule.
        HorovodInternalError: ranks have different settings or process sets, or a rank
            did not arrive.
    """
    global _world
    with _lock:
        if _world is not None:
            return
        _log_unknown()
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
        world = _world = _joined(
            place,
            settings,
            members=list(comm) if comm else None,
            process_sets=list(process_sets or ()),
            membership=_membership,
        )
        if _membership is None:
            world.present = environment.present_ranks(os.environ)
    atexit.register(shutdown)
    if settings.timeline is not None:
        start_timeline(settings.timeline, settings.mark_cycles)


def _joined(
    place: Place | None,
    settings: HorovodSettings,
    *,
    members: list[int] | None,
    process_sets: list[ProcessSet],
    membership: MembershipCallbacks | None,
) -> World:
    """Return a world of ranks that have met.

    Raises:
        HorovodInternalError: ranks differ, or a rank did not arrive.
    """
    try:
        ranks, group = meeting.meet(
            place,
            members=members,
            timeout_s=settings.timeout_s,
            is_over=membership.is_over if membership is not None else lambda: False,
        )
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc
    world = World(ranks, group, settings, membership)
    try:
        world.topology = topology.exchange(
            ranks, place, closes_gaps=membership is not None
        )
        _add_sets(world, process_sets)
    except StrettoError as exc:
        _give_up(world, exc)
        raise HorovodInternalError(str(exc)) from exc
    except BaseException as exc:
        _give_up(world, StrettoError(str(exc)))
        raise
    return world


def _give_up(world: World, error: StrettoError) -> None:
    """End a world that was not completed."""
    if world.has_membership:
        world.leave(error)
    else:
        world.close()


def rejoin(
    settings: HorovodSettings,
    membership: MembershipCallbacks,
    process_sets: list[ProcessSet],
) -> None:
    """Join the ranks of a new default group, after `leave`.

    Raises:
        HorovodInternalError: ranks differ, or a rank is lost.
    """
    global _world, _membership
    with _lock:
        _membership = membership
        _world = _joined(
            environment.place(os.environ),
            settings,
            members=None,
            process_sets=process_sets,
            membership=membership,
        )
    atexit.register(shutdown)
    if rank():
        timeline.stop_timeline()
    elif settings.timeline is not None:
        start_timeline(settings.timeline, settings.mark_cycles)


def leave(error: StrettoError | None) -> None:
    """Give up the ranks in order to `rejoin` others; do nothing without `init`.

    Args:
        error: what ends operations under way; ``None`` if all ranks leave now.
    """
    global _world
    with _lock:
        world, _world = _world, None
    if world is not None:
        atexit.unregister(shutdown)
        world.leave(error)


def abort(error: StrettoError) -> None:
    """Make all operations fail, from any thread, until `leave`."""
    if (world := _world) is not None:
        world.abort(error)


def changes_ranks() -> bool:
    """Return whether this process may get other ranks to train with."""
    return variable_names.KEEPER in os.environ


def _add_sets(world: World, process_sets: list[ProcessSet]) -> None:
    global_process_set.ranks = list(range(world.ranks.size))
    world.agree("call init()", "; ".join(str(s.ranks) for s in process_sets))
    world.add(global_process_set)
    for process_set in process_sets:
        if not world.alias_if_known(process_set):
            world.add(process_set)


def _log_unknown() -> None:
    global _has_logged_unknown
    names = environment.unknown(os.environ)
    if names and not _has_logged_unknown:
        _has_logged_unknown = True
        _log.warning("these variables have no effect: %s", ", ".join(names))


def shutdown() -> None:
    """Leave the job: end connections and threads; do nothing without `init`.

    All ranks should call it. Operations under way on other ranks fail there with
    `HorovodInternalError`. A process group that existed before `init` is kept.
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
    # them, now and not at some later garbage collection.
    gc.collect()


def is_initialized() -> bool:
    """Return whether `init` was called without a later `shutdown`."""
    return _world is not None


def rank() -> int:
    """Return this process's global rank.

    Of a rank that has yet to join a job, the one that it would have now, after those
    of the ranks that train.

    Raises:
        ValueError: `init` was not called. The functions below raise it too.
    """
    world = current()
    return world.ranks.rank if world.present is None else world.present


def size() -> int:
    """Return the number of ranks."""
    world = current()
    return world.ranks.size if world.present is None else world.present + 1


def _topology() -> Topology:
    found = current().topology
    if found is None:
        raise AssertionError("a world has a topology once init() has returned")
    return found


def local_rank() -> int:
    """Return this process's rank on its host."""
    return _topology().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _topology().local_size


def cross_rank() -> int:
    """Return this host's index among those that have a rank with this local rank."""
    return _topology().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return _topology().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return _topology().is_homogeneous


def shard(n: int) -> range:
    """Return this rank's indices out of ``n`` samples, an equal part for each rank.

    Raises:
        SpecError: ``n`` is not a multiple of the number of ranks; an average of ranks
            would then weight samples unequally.
    """
    ranks = size()
    if n % ranks:
        raise SpecError(
            f"{n} samples can't be divided equally among {ranks} ranks: use "
            f"{n - n % ranks} or {n - n % ranks + ranks}"
        )
    share = n // ranks
    return range(rank() * share, (rank() + 1) * share)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set; every rank must call it, with the same ranks.

    Returns:
        The set that was passed, or one created from the ranks that were passed.

    Raises:
        ValueError: sets are not dynamic, or a set of these ranks already exists.
        HorovodInternalError: ranks have different sets, or a rank did not arrive.
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
    """End a process set; every rank must call it.

    Returns:
        Whether it was removed: False for the global set and for a set that is not
        added.

    Raises:
        ValueError: sets are not dynamic.
        HorovodInternalError: ranks have different sets, or a rank did not arrive.
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


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Write a timeline into ``file_path`` from now on, on rank 0 only.

    A running timeline ends; one for the same file continues. In HOROVOD_TIMELINE the
    word DYNAMIC means that a program starts one later.

    Args:
        file_path: The file to replace: a Chrome trace, valid JSON at any time.
        mark_cycles: Whether to mark each round of the negotiation.

    Raises:
        ValueError: `init` was not called, or the file can't be written.
    """
    if rank() == 0:
        timeline.open_timeline(file_path, mark_cycles=mark_cycles)
