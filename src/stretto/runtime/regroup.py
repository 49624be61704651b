"""The default process group of one membership after another, in one process.

Called by `stretto.elastic.training` and `stretto.horovod.torch.regrouping`. The
memberships are those of `stretto.members`.

# Note [What a lost rank leaves behind]
Gloo reports a lost rank only to its neighbors; everyone else waits for the timeout.
So when a membership ends, every rank shuts down the sockets of its lanes, of its
default group and of its connections to the store, and what waits on them fails. Sockets
are those that were opened while the group or a lane was made. A request to the store of
a host without power would never end otherwise.

A call to end a generation may come when the next one is being built, or is in use.
`MemberGroup.end` therefore names the last generation to end, and touches no later one.
If it comes while that generation is being built, it is repeated until the building has
failed, because more sockets may open in between. A rank may also wait for the
connection of one that is lost, or that is in a later generation: there is no socket to
shut down then, and `answer_listeners` makes that connection.

Old groups and lanes are kept and released one by one, because a release takes 10 to
60 ms. Only those of one generation are kept: if memberships follow each other faster
than steps, the next one releases the rest. Nothing here collects garbage, which would
stop training for longer, so nothing may refer to a group in a cycle. Errors do, by the
frames of their tracebacks: `forget_frames` ends that once an error is handled.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout, PlanMismatch
from stretto.runtime import backends
from stretto.runtime.ranks import timeout_of
from stretto.runtime.sockets import (
    Socket,
    answer_listeners,
    connections_among,
    connections_to,
    open_sockets,
    shut,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from stretto.runtime.ddp import DistributedDataParallel

_PROBE_S = 2.0
_AGAIN_S = 0.02

_STALLED = 10
"""Attempts to end a generation that is being built until its ranks are taken for ones
that wait for a connection of another rank."""

_CONNECT_S = 1.0
"""How long one attempt to connect to a store may take."""

_STORE_S = 30.0
"""How long all attempts may take, while connections are not refused."""


def why_fixed(model: DistributedDataParallel) -> str | None:
    """Return why a model can't change its ranks, or ``None`` if it can."""
    if model._negotiated is not None:  # noqa: SLF001
        return "order='negotiated' has an engine that keeps its ranks"
    if model._comm_hooks or model._builtin_hook is not None:  # noqa: SLF001
        return "a communication hook may hold the old ranks' process group"
    if model.static_graph:
        return "static_graph=True counts gradients with the ranks it began with"
    name = model._backend  # noqa: SLF001
    backend = backends.of_group(name)
    if backend is None or not backend.regroups:
        return f"the process group's backend is {name}, not {backends.ON_HOST}"
    plan = model._own_plan  # noqa: SLF001
    if plan is not None and plan.overlap == "forward":
        return "the plan overlaps with forward, where steps are partly under way"
    if model.process_group is not dist.distributed_c10d._get_default_group():  # noqa: SLF001
        return "its process group is not the default group"
    return None


def connect_store(
    address: str, *, timeout: Any, require_current: Callable[[], None]
) -> Any:
    """Return a store whose server is a rank that may end meanwhile.

    The constructor of a TCPStore retries until its timeout, whatever happens to the
    membership, so each attempt is short. An attempt that is accepted and never answered
    has no timeout: shutting its connection down ends it.

    Args:
        address: ``host:port`` of the server.
        timeout: the store's own, for requests.
        require_current: raises if the membership has ended; called before each attempt.

    Raises:
        CommTimeout: the server's process has ended.
        RuntimeError: it accepts connections and does not serve them.
    """
    host, _, port = address.rpartition(":")
    deadline_s = time.perf_counter() + _STORE_S
    while True:
        require_current()
        try:
            # A refused connection is known at once; a TCPStore would retry.
            socket.create_connection((host, int(port)), _PROBE_S).close()
        except OSError as error:
            raise CommTimeout(
                f"the store of the membership at {address} does not answer: {error}"
            ) from error
        try:
            store = cast("Any", dist).TCPStore(
                host,
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=timeout_of(_CONNECT_S),
            )
        except dist.DistError:
            if time.perf_counter() >= deadline_s:
                raise
        else:
            store.set_timeout(timeout)
            return store


def _release(parts: list[Any]) -> None:
    """Release process groups and lanes while the rank trains.

    A group's destructor waits for its threads. It was seen to wait for good, which
    must not stop a rank.
    """
    threading.Thread(target=parts.clear, name="stretto-release", daemon=True).start()


class AbstractMemberGroup(abc.ABC):
    """Makes the default group for each membership, and ends what waits in old ones."""

    def __init__(self, *, host: str, timeout: timedelta) -> None:
        """Serve a store, in case this rank becomes the first.

        Args:
            host: the address at which other ranks reach this process.
            timeout: of the groups' collectives.
        """
        self._timeout = timeout
        self._store = cast("Any", dist).TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timeout_of(10.0)
        )
        self.address = f"{host}:{self._store.port}"
        """Where others reach the store that this rank can serve."""

        self.generation = 0
        """The generation that was entered last."""

        self._hooks: tuple[Any, Any] | None = None
        self._lock = threading.Lock()
        self._ended = 0
        self._is_built = threading.Event()
        self._is_built.set()
        self._before: set[Socket] = set()
        self._port = self._size = 0
        self._sockets: set[Socket] = set()
        self._parked: list[Any] = []

    @abc.abstractmethod
    def _leave(self) -> list[Any]:
        """Give up the ranks; return what to release later, part by part."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """End connections that are not the group's; callable from any thread."""

    def enter(self, generation: int, rank: int, size: int, address: str) -> None:
        """Make the default group of a generation, without what follows it.

        Args:
            generation: the membership's number; higher than any before.
            rank: this process's rank in it.
            size: how many ranks it has.
            address: ``host:port`` of its first rank's store.

        Raises:
            CommTimeout: its first rank is lost.
            RuntimeError: a rank is lost.
        """
        if self.generation:
            self.end(
                generation - 1
            )  # afterwards, a late call leaves these sockets open
        with self._lock:
            self.generation = generation
            self._before, self._sockets = open_sockets(), set()
            self._port = int(address.rpartition(":")[2])
            self._size = size
            self._is_built.clear()
        store = connect_store(
            address, timeout=self._timeout, require_current=self.require_current
        )
        self.require_current()
        self._park(self._leave())
        if dist.is_initialized():
            dist.destroy_process_group()
        # Each group's hook calls the previous one.
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        hook = sys.excepthook
        # Ranks meet under a group's number. An attempt that failed has used one up,
        # and newcomers count from 0.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        dist.init_process_group(
            backends.ON_HOST,
            store=PrefixStore(f"stretto/{generation}", store),
            rank=rank,
            world_size=size,
            timeout=self._timeout,
        )
        self._hooks = hook, sys.excepthook
        with self._lock:
            self._sockets |= self._new_sockets()

    def skip(self, generation: int) -> None:
        """Take no part in a generation; the next one to enter follows it."""
        with self._lock:
            self.generation = max(self.generation, generation)
            self._ended = max(self._ended, generation)

    def is_over(self) -> Callable[[], bool]:
        """Return what says whether the present generation has been ended."""
        generation = self.generation
        return lambda: self._ended >= generation

    @property
    def has_ended(self) -> bool:
        """Whether the present generation has been ended, and its connections with it.

        A rank alone makes no collective that would fail.
        """
        return self._ended >= self.generation

    def built(self) -> None:
        """The generation's groups and lanes exist, or their making was given up."""
        with self._lock:
            if not self._is_built.is_set():
                # Connections to the store, too: requests to a lost host never end.
                self._sockets |= self._new_sockets()
            self._is_built.set()

    def end(self, generation: int) -> None:
        """Make everything fail that waits in a generation or in earlier ones.

        Callable from any thread. A later generation is left alone.
        """
        for attempt in itertools.count(1):
            with self._lock:
                if generation < self._ended:
                    return
                self._ended = generation
                if generation < self.generation:
                    return
                is_built = self._is_built.is_set()
                found = set(self._sockets)
                if not is_built:
                    found |= self._new_sockets()
                shut(found)
                self._abort()
            if is_built or self._is_built.wait(_AGAIN_S):
                return
            if attempt % _STALLED == 0:
                answer_listeners(open_sockets() - self._before, self._size)

    def release_one(self) -> None:
        """Release one part of an old generation, if there is any."""
        if self._parked:
            _release([self._parked.pop(0)])

    def _park(self, parts: list[Any]) -> None:
        """Keep the parts of the last generation, and release those of earlier ones."""
        earlier, self._parked = self._parked, [p for p in parts if p is not None]
        if earlier:
            _release(earlier)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Let the end of the generation end what is opened in the block, too."""
        with self._lock:
            is_first = self._is_built.is_set()
            if is_first:
                self._before = open_sockets()
                self._is_built.clear()
        try:
            self.require_current()
            yield
        finally:
            if is_first:
                self.built()

    def require_current(self) -> None:
        """Require that the present generation has not been ended.

        Raises:
            CommTimeout: it has.
        """
        if self.has_ended:
            raise CommTimeout(f"membership {self.generation} has ended")

    def _new_sockets(self) -> set[Socket]:
        """Return the sockets of the generation that is being built."""
        new = open_sockets() - self._before
        with contextlib.suppress(OSError):
            return connections_among(new, self._port) | connections_to(new, self._port)
        return set()


@final
class MemberGroup(AbstractMemberGroup):
    """The groups of a model, which follows them."""

    def __init__(self, model: DistributedDataParallel, *, host: str) -> None:
        """Serve a store, in case this rank becomes the first.

        Args:
            model: follows the group.
            host: the address at which other ranks reach this process.

        Raises:
            PlanMismatch: the model can't change its ranks.
        """
        if (why := why_fixed(model)) is not None:
            raise PlanMismatch(
                f"this model can't regroup when ranks are lost: {why}. Build it "
                "without that, or start the job without --elastic."
            )
        self._model = model
        model._changes_ranks = True  # noqa: SLF001
        default = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        backend: Any = default._get_backend(model._device_used)  # noqa: SLF001
        super().__init__(host=host, timeout=backend.options._timeout)  # noqa: SLF001

    def join(self, note: str, require: Callable[[list[str]], None]) -> list[str]:
        """Let the model train with the ranks of the group; return each rank's note.

        Args:
            note: what the others must know.
            require: called with the notes first; raises where this rank must not train
                with the others, who continue without it.

        Raises:
            RankDisagreement: ranks have different models or versions.
            CommTimeout: a rank is lost.
            RuntimeError: a rank is lost.
        """
        self.require_current()
        self._model._is_over = self.is_over()  # noqa: SLF001
        default = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        return self._model._join_ranks(default, note, require)  # noqa: SLF001

    def _leave(self) -> list[Any]:
        return [self._model.process_group, *self._model._leave_ranks()]  # noqa: SLF001

    def _abort(self) -> None:
        pool = self._model._lane_pool  # noqa: SLF001
        if pool is not None:
            pool.abort()
