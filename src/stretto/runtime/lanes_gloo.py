"""Lanes over Gloo: connections and threads of their own.

# Note [What resource means on Gloo]
A Gloo collective uses one connection to each peer and one thread at each end, whatever
its group has. So more threads for a lane, or more connections, bring a collective
nothing by themselves; cut into r pieces, each on a connection of its own, it takes r
flows of the network and r threads of the host. That is what ``resource = r`` of a
bucket is carried out as: r pieces on r connections of its lane. Measured, 2 ranks,
connections paced at 18.75 MB/s, one all-reduce of 4 MiB: 220 ms on 1 connection and 2
threads, 224 on 1 and 8, 224 on 4 and 4 in one piece, 57 on 4 and 4 in four pieces, 56
in four slices on four lanes (256 KiB: 10.8, 13.7, 10.9, 3.3, 3.3; two busy cores;
benchmarks/gloo_resources.py). A resource is thus worth as much as slices; it takes no
other lane's place, which is what a planner that gives each bucket its share on one lane
(LIBRA) means.

Buckets of different resource on one lane share the lane's connections in turn. One with
more pieces than the one before may begin on connections that are free already.

# Note [Threads per lane]
At least two worker threads per Gloo lane, as PyTorch gives a group of its own.
Collectives of a lane start in launch order, and the second in line may begin its
start-up while the first still sends: they share the lane's one connection, so the
lane's rate stays what it is and only the pause between two collectives goes. Measured,
2 threads against 1, time of backward, 10 MB of gradients: 2 ranks, connections paced at
37.5 MB/s: 0.95 to 1.02; 4 ranks the same: 0.91 to 1.03; 2 ranks on free loopback: 0.65
to 0.80 on one lane, 0.98 to 1.05 on four (medians of ratios within one run, two busy
cores).
"""

from __future__ import annotations

import os
import resource as process_limits
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from stretto.errors import CommTimeout, PlanMismatch
from stretto.runtime.agreement import timeout_of, who_is_gone
from stretto.runtime.presence import Wait, call_aside
from stretto.runtime.sockets import Socket, connections_among, open_sockets, shut

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.agreement import Ranks

LEAST_THREADS = 2

_LATE_S = 1.0
"""A rank that has ended may have connected before."""

_TIMEOUTS = 1.5
"""Gloo ends by itself at its time-out, unless the store does not answer."""

_MORE_DESCRIPTORS = 3
"""Descriptors of a connection to every peer beyond one per peer: its listener, its
poll set and its wake-up. Counted with torch 2.13."""


def connections_of(needs: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """Connections per peer of each lane: as many as its largest resource."""
    connections: dict[int, int] = {}
    for lane, resource in needs:
        connections[lane] = max(resource or 1, connections.get(lane, 1))
    return connections


def descriptors_of(connections: Iterable[int], ranks: int) -> int:
    """File descriptors that lanes with so many connections take in each process."""
    return sum(connections) * (ranks + _MORE_DESCRIPTORS)


def check(
    needs: Sequence[tuple[int, int | None]],
    ranks: int,
    *,
    descriptors_open: int,
    descriptors_most: int,
) -> None:
    """Requires that a process may open the files that a plan's lanes are.

    Raises:
        PlanMismatch: with both numbers.
    """
    connections = connections_of(needs)
    wanted = descriptors_of(connections.values(), ranks)
    if descriptors_open + wanted > descriptors_most:
        raise PlanMismatch(
            f"the plan's {len(connections)} lanes with {sum(connections.values())} "
            f"connections to each of {ranks - 1} peers take {wanted} file descriptors "
            f"in each process, beside {descriptors_open} open ones; this process may "
            f"have {descriptors_most}. Run `ulimit -n {descriptors_open + 2 * wanted}` "
            "before the job, or plan with fewer lanes or less resource."
        )


def check_here(
    needs: Sequence[tuple[int, int | None]], ranks: int, _device: torch.device
) -> None:
    """`check` against this process's limits."""
    most = process_limits.getrlimit(process_limits.RLIMIT_NOFILE)[0]
    if most == process_limits.RLIM_INFINITY:
        return
    try:
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        count = 0
    check(needs, ranks, descriptors_open=count, descriptors_most=most)


@final
class GlooLanes:
    """Opens Gloo backends and ends their connections."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
    ) -> None:
        del device  # Gloo stages what lies on a device through the host itself
        self._ranks = ranks
        self._store_for = store_for
        self._lanes: dict[tuple[int, int], Any] = {}
        self._sockets: set[Socket] = set()
        self._made: Counter[tuple[int, int]] = Counter()
        self.end_requests: Callable[[], None] = lambda: None
        """Ends what waits in the lanes' store."""

    def open(
        self, needs: Sequence[tuple[int, int | None]]
    ) -> dict[tuple[int, int | None], Any]:
        """The backends that carry what one plan asks; collective."""
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
        # Each device is a connection to every peer and a thread that serves them.
        options._devices = [  # noqa: SLF001
            _gloo_device(number + i) for i in range(connections)
        ]
        options._threads = max(LEAST_THREADS, connections)  # noqa: SLF001
        options._timeout = timeout_of(self._ranks.timeout_s)  # noqa: SLF001
        # A lane that is opened again must not find its first addresses in the store.
        self._made[number, connections] += 1
        times = self._made[number, connections]
        name = f"{number}/{connections}" + (f"/{times}" if times > 1 else "")
        return self._connect(
            number,
            partial(
                gloo,
                self._store_for(name),
                self._ranks.rank,
                self._ranks.size,
                options,
            ),
        )

    def _connect(self, number: int, connect: Callable[[], Any]) -> Any:
        """Return what ``connect`` makes, unless a rank is lost meanwhile.

        Gloo by itself waits for a peer that is gone until its time-out, which may be
        half an hour.

        Raises:
            CommTimeout: naming the rank.
            RuntimeError: what Gloo raises.
        """
        ranks = self._ranks
        watch = Wait(ranks.presence, grace_s=_LATE_S)
        deadline = time.perf_counter() + _TIMEOUTS * ranks.timeout_s
        lost: dict[int, str] = {}

        def in_vain() -> bool:
            lost.update(watch.lost(ranks.names))
            return bool(lost) or time.perf_counter() > deadline

        before = open_sockets()
        ended, found = call_aside(
            connect,
            name="stretto-opening",
            look=in_vain,
            give_up=lambda: self._end_opening(before),
        )
        if ended:
            return found
        why = (
            who_is_gone(
                ranks, [r for r in range(ranks.size) if ranks.names[r] in lost], lost
            )
            if lost
            else f"a rank or the store, which {ranks.name(0)} or the launcher holds, "
            f"did not answer for {_TIMEOUTS * ranks.timeout_s:g} s"
        )
        raise CommTimeout(f"{ranks.name(ranks.rank)} can't open lane {number}: {why}")

    def _end_opening(self, before: set[Socket]) -> None:
        """Let Gloo's opening of a lane fail now rather than at its time-out."""
        # A thread that came back while the interpreter is being finalized would end
        # the process. See Note [Exit while Gloo's threads still work].
        self.end_requests()
        shut(connections_among(open_sockets() - before, self._ranks.store))

    def abort(self) -> None:
        """Shuts the sockets down that came with the lanes.

        Gloo has no such call (its ``abort`` does nothing).
        """
        shut(self._sockets)

    def retain(self, lanes: Container[int]) -> None:
        """Release the backends of other lanes; each ends with its last user."""
        for key in [key for key in self._lanes if key[0] not in lanes]:
            del self._lanes[key]

    def close(self) -> None:
        """Lets go of the backends: Gloo ends their threads and connections."""
        self._lanes.clear()
        self._sockets.clear()


def _gloo_device(number: int) -> Any:
    """A network device of its own: its own listener and I/O thread."""
    named = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    if named:
        interface = named[number % len(named)]
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
