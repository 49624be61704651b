"""Lanes over Gloo, each with its own connections and threads.

# Note [What resource means on Gloo]
A Gloo collective uses one connection to each peer and one thread at each end, whatever
its group has. So more threads or connections for a lane do not speed up a collective by
themselves. Cut into r pieces, each on its own connection, it uses r flows of the
network and r threads of the host. A bucket's ``resource = r`` is executed as r pieces
on r connections of its lane. Measured, 2 ranks, connections paced at 18.75 MB/s, one
all-reduce of 4 MiB: 220 ms on 1 connection and 2 threads, 224 on 1 and 8, 224 on 4 and
4 in one piece, 57 on 4 and 4 in four pieces, 56 in four slices on four lanes (256 KiB:
10.8, 13.7, 10.9, 3.3, 3.3; two busy cores; benchmarks/gloo_resources.py). A resource is
as effective as slices, but it does not occupy other lanes, which is what a planner that
gives each bucket its share on one lane (LIBRA) needs.

Buckets with different resources on one lane share the lane's connections in turn. A
bucket with more pieces than the previous one may begin on connections that are already
free.

# Note [Threads per lane]
Each Gloo lane has at least two worker threads, the number that PyTorch gives a group.
Collectives of a lane start in launch order, and the second one may begin its start-up
while the first still sends: they share the lane's one connection, so the lane's rate is
the same and only the pause between two collectives disappears. Measured, 2 threads
against 1, time of backward, 10 MB of gradients: 2 ranks, connections paced at 37.5
MB/s: 0.95 to 1.02; 4 ranks the same: 0.91 to 1.03; 2 ranks on free loopback: 0.65 to
0.80 on one lane, 0.98 to 1.05 on four (medians of ratios within one run, two busy
cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource as process_limits
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from stretto.errors import CommTimeout, PlanMismatch, StrettoError
from stretto.process_identity import ProcessState
from stretto.runtime.backends.base import AbstractBackend, AbstractLanes
from stretto.runtime.presence import Wait, call_aside, is_communication_error
from stretto.runtime.ranks import timeout_of
from stretto.runtime.sockets import Socket, connections_among, open_sockets, shut
from stretto.runtime.store import loss_message, store_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.ranks import Ranks

MIN_THREADS = 2

_LATE_S = 1.0
"""A rank that has ended may have connected before."""

_LOOK_EVERY_S = 0.1

_LOSS = "lost: "
"""Begins a note about a lost rank or store."""

_NOTE_CHARACTERS = 500

_OWN_LIMITS = tuple(
    os.strerror(number)
    for number in (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EAGAIN,
        errno.EADDRNOTAVAIL,
    )
)
"""Errors of a process that has no more files, memory, threads or addresses."""

_TIMEOUTS = 1.5
"""Gloo ends the wait itself at its timeout, unless the store does not answer."""

_MORE_DESCRIPTORS = 3
"""Descriptors per connection beyond one per peer: its listener, its poll set and its
wake-up. Counted with torch 2.13."""


def connections_of(needs: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """Return the connections per peer of each lane: as many as its largest resource."""
    connections: dict[int, int] = {}
    for lane, resource in needs:
        connections[lane] = max(resource or 1, connections.get(lane, 1))
    return connections


def descriptors_of(connections: Iterable[int], ranks: int) -> int:
    """Return the file descriptors of lanes with these connections in each process."""
    return sum(connections) * (ranks + _MORE_DESCRIPTORS)


def check(
    needs: Sequence[tuple[int, int | None]],
    ranks: int,
    *,
    descriptors_open: int,
    max_descriptors: int,
) -> None:
    """Require that a process may open the files for a plan's lanes.

    Raises:
        PlanMismatch: with both numbers.
    """
    connections = connections_of(needs)
    wanted = descriptors_of(connections.values(), ranks)
    if descriptors_open + wanted > max_descriptors:
        raise PlanMismatch(
            f"the plan's {len(connections)} lanes with {sum(connections.values())} "
            f"connections to each of {ranks - 1} peers take {wanted} file descriptors "
            f"in each process, besides {descriptors_open} open ones; this process may "
            f"have {max_descriptors}. Run `ulimit -n {descriptors_open + 2 * wanted}` "
            "before the job, or plan with fewer lanes or less resource."
        )


def check_here(
    needs: Sequence[tuple[int, int | None]], ranks: int, _device: torch.device
) -> None:
    """Run `check` against this process's limits."""
    limit = process_limits.getrlimit(process_limits.RLIMIT_NOFILE)[0]
    if limit == process_limits.RLIM_INFINITY:
        return
    try:
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        count = 0
    check(needs, ranks, descriptors_open=count, max_descriptors=limit)


@final
class GlooBackend(AbstractBackend):
    """Gloo, on TCP: completion is seen on the host."""

    name = "gloo"
    device_type = "cpu"
    completes_on_host = True
    regroups = True
    # Closing would wait for work under way, possibly for a peer that failed.
    ends_at_exit = False

    @property
    def kind(self) -> Any:
        """Torch's type."""
        return dist.ProcessGroup.BackendType.GLOO

    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require that this process may open the files."""
        check_here(needs, ranks, device)

    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> GlooLanes:
        """Return the lanes of a model."""
        del device  # Gloo itself stages device tensors through the host
        return GlooLanes(
            ranks=ranks, store_for=store_for, end_requests=end_requests, notes=notes
        )

    def collectives_per_slice(self, resource: int | None) -> int:
        """Return ``resource``: the connections that send a slice's parts."""
        return resource or 1

    def stream_launch(self, device: torch.device) -> None:
        """Return nothing: the host waits."""
        del device


# Note [Lanes in a forked process]
# A forked process has Gloo's backends without their threads: ending them would wait for
# these forever, or crash. PyTorch keeps its process groups until the process ends, but
# a lane ends with its model, for instance in a worker that drops its parent's model or
# collects garbage. So a forked process never ends them.
_backends: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_forever() -> None:
    for backend in list(_backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_keep_forever)


@final
class GlooLanes(AbstractLanes):
    """Opens Gloo backends and ends their connections."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> None:
        self._ranks = ranks
        self._notes = notes
        self._store_for = store_for
        self._lanes: dict[tuple[int, int], Any] = {}
        self._sockets: set[Socket] = set()
        self._made: Counter[tuple[int, int]] = Counter()
        self._process = os.getpid()
        self._end_requests = end_requests or (lambda: None)
        """Ends requests that wait in the lanes' store."""

    def open(
        self, needs: Sequence[tuple[int, int | None]]
    ) -> dict[tuple[int, int | None], Any]:
        """Return the backends for one plan's lanes; collective."""
        connections = connections_of(needs)
        return {need: self._lane(need[0], connections[need[0]]) for need in needs}

    def _lane(self, number: int, connections: int) -> Any:
        key = (number, connections)
        if key not in self._lanes:
            before = open_sockets()
            self._lanes[key] = self._make(number, connections)
            self._sockets |= connections_among(
                open_sockets() - before, self._ranks.store
            )
        return self._lanes[key]

    def _make(self, number: int, connections: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001
        options._threads = max(MIN_THREADS, connections)  # noqa: SLF001
        options._timeout = timeout_of(self._ranks.timeout_s)  # noqa: SLF001
        # A reopened lane must not find its first addresses in the store.
        self._made[number, connections] += 1
        times = self._made[number, connections]
        name = f"{number}/{connections}" + (f"/{times}" if times > 1 else "")

        def connect() -> Any:
            # Each device is a connection to every peer and a thread that serves it.
            options._devices = [  # noqa: SLF001
                _gloo_device(number + i) for i in range(connections)
            ]
            made = gloo(
                self._store_for(name), self._ranks.rank, self._ranks.size, options
            )
            _backends.add(made)
            return made

        try:
            return self._connect(number, name, connect)
        except StrettoError:
            raise
        except Exception as exc:
            # The others would wait for this rank until Gloo's timeout.
            loss = self._loss(number, exc)
            rank = self._ranks.name(self._ranks.rank)
            note = f"{rank} can't open lane {number}: {exc}".splitlines()[0]
            left = note if loss is None else f"{_LOSS}{loss}"
            with contextlib.suppress(RuntimeError):
                self._notes.set(name, left[:_NOTE_CHARACTERS])
            if loss is not None:
                raise loss from exc
            if any(text in str(exc) for text in _OWN_LIMITS):
                raise PlanMismatch(note) from exc
            raise

    def _loss(self, number: int, cause: Exception) -> CommTimeout | None:
        """Return the error for a peer or store that was lost; ``None`` for others."""
        ranks, is_store = self._ranks, isinstance(cause, dist.DistError)
        if not (is_store or is_communication_error(cause)):
            return None
        purpose = f"open lane {number}"
        watch = Wait(ranks.presence, every_s=_LOOK_EVERY_S)
        deadline = time.perf_counter() + _LATE_S
        while time.perf_counter() < deadline:
            if lost := watch.lost(ranks.names):
                gone = [r for r in range(ranks.size) if ranks.names[r] in lost]
                why = loss_message(ranks, gone, lost)
                return CommTimeout(f"{ranks.name(ranks.rank)} can't {purpose}: {why}")
            time.sleep(_LOOK_EVERY_S)
        if is_store and (stopped := self._stopped()):
            who = ranks.name_all(stopped)
            verb = "is" if len(stopped) == 1 else "are"
            return CommTimeout(
                f"{ranks.name(ranks.rank)} can't {purpose}: {who} {verb} stuck (it "
                f"{ProcessState.STOPPED.value}). Check the log of {who} first."
            )
        return store_lost(ranks, purpose, cause) if is_store else None

    def _stopped(self) -> list[int]:
        """Return ranks whose processes are stopped.

        A wait in the store also ends if another rank does not write its address.
        """
        presence = self._ranks.presence
        if presence is None:
            return []
        states = [presence.state(name) for name in self._ranks.names]
        return [
            rank for rank, state in enumerate(states) if state is ProcessState.STOPPED
        ]

    def _connect(self, number: int, name: str, connect: Callable[[], Any]) -> Any:
        """Return the result of ``connect``, unless a rank can't take part.

        Gloo itself waits for a lost peer until its timeout, which may be half an hour.

        Raises:
            CommTimeout: a rank is lost; the message names it.
            PlanMismatch: another rank can't open the lane; the message says why.
            RuntimeError: Gloo's own error.
        """
        ranks = self._ranks
        watch = Wait(ranks.presence, grace_s=_LATE_S)
        deadline = time.perf_counter() + _TIMEOUTS * ranks.timeout_s
        lost: dict[int, str] = {}
        failed: list[str] = []

        def is_hopeless() -> bool:
            lost.update(watch.lost(ranks.names))
            with contextlib.suppress(RuntimeError):
                if self._notes.check([name]):
                    failed.append(self._notes.get(name).decode())
            return bool(lost or failed) or time.perf_counter() > deadline

        before = open_sockets()
        ended, found = call_aside(
            connect,
            name="stretto-opening",
            look=is_hopeless,
            give_up=lambda: self._end_opening(before),
        )
        if ended:
            return found
        if lost:
            gone = [r for r in range(ranks.size) if ranks.names[r] in lost]
            why = loss_message(ranks, gone, lost)
        elif failed and failed[0].startswith(_LOSS):
            raise CommTimeout(failed[0].removeprefix(_LOSS))
        elif failed:
            raise PlanMismatch(failed[0])
        else:
            why = (
                f"a rank or the store, held by {ranks.name(0)} or the launcher, did "
                f"not answer for {_TIMEOUTS * ranks.timeout_s:g} s"
            )
        raise CommTimeout(f"{ranks.name(ranks.rank)} can't open lane {number}: {why}")

    def _end_opening(self, before: set[Socket]) -> None:
        """Make Gloo's opening of a lane fail now rather than at its timeout."""
        # A thread that returned while the interpreter is finalizing would end the
        # process. See Note [Exit while Gloo's threads still work].
        self._end_requests()
        shut(connections_among(open_sockets() - before, self._ranks.store))

    def abort(self) -> None:
        """Shut down the lanes' sockets.

        Gloo has no such call (its ``abort`` does nothing). A forked process shares the
        sockets, and leaves them alone.
        """
        if os.getpid() == self._process:
            shut(self._sockets)

    def retain(self, lanes: Container[int]) -> None:
        """Release the backends of other lanes; each ends with its last user."""
        for key in [key for key in self._lanes if key[0] not in lanes]:
            del self._lanes[key]

    def close(self) -> None:
        """Release the backends: Gloo ends their threads and connections."""
        self._lanes.clear()
        self._sockets.clear()


def _gloo_device(number: int) -> Any:
    """Return a new network device, with its own listener and I/O thread."""
    named = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    if named:
        interface = named[number % len(named)]
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
