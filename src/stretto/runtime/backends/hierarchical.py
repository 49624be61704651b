"""Lanes in two levels: shared memory within each host, Gloo across hosts.

`hierarchical_lane` executes their collectives.

# Note [What resource means in two levels]
As on Gloo: a slice is cut into as many pieces, each on a connection of its own across
hosts.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout, PlanMismatch, StrettoError
from stretto.process_identity import host_name, kernel_id
from stretto.runtime import backends
from stretto.runtime.backends.base import AbstractBackend, AbstractLanes
from stretto.runtime.backends.gloo import GlooLanes, connections_of
from stretto.runtime.backends.hierarchical_lane import (
    NAME,
    HierarchicalLane,
    Layout,
)
from stretto.runtime.backends.local_lanes import LocalLanes
from stretto.runtime.store import missing_after
from stretto.runtime.weak_call import weakly

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.ranks import Ranks

_LEVELS = ("within the host", "across hosts", "over all ranks")

_LOSS = "lost: "
"""Begins what a rank reports about a lost one."""


def own_host() -> str:
    """Return what only processes of this host have in common, for others to compare.

    Containers with a network or with process ids of their own count as hosts: they
    don't share memory, or may not.
    """
    try:
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115
    except OSError:
        network = ""
    return f"{host_name()} {kernel_id()} {network}"


def layout_of(hosts: Sequence[str], rank: int) -> Layout:
    """Return the layout of ranks whose hosts are given, in rank order.

    Raises:
        PlanMismatch: hosts have different numbers of ranks.
    """
    found: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        found.setdefault(host, []).append(each)
    counts = [len(ranks) for ranks in found.values()]
    if len(set(counts)) > 1:
        places = "; ".join(
            f"{len(ranks)} on {host.split()[0]}" for host, ranks in found.items()
        )
        raise PlanMismatch(
            f"hierarchical lanes need equally many ranks on every host, but there are "
            f"{places}: start as many on each, or leave lane_backend out."
        )
    return Layout(tuple(map(tuple, found.values())), rank)


@final
class HierarchicalBackend(AbstractBackend):
    """Shared memory within hosts, Gloo across: completion is seen on the host."""

    name = NAME
    algorithms = ("hierarchical", "ring")
    device_type = "cpu"
    completes_on_host = True
    # A thread that waits for a peer must not wake in a finalizing interpreter.
    ends_at_exit = True

    @property
    def kind(self) -> Any:
        """Torch's type: it has none for this."""
        return dist.ProcessGroup.BackendType.CUSTOM

    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require what both levels require of this process."""
        for name in ("local", "gloo"):
            backends.get(name).check(needs, ranks, device)

    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> HierarchicalLanes:
        """Return the lanes of a model."""
        del device
        return HierarchicalLanes(ranks, store_for, end_requests, notes)

    def collectives_per_slice(self, resource: int | None) -> int:
        """Return ``resource``: see Note [What resource means in two levels]."""
        return resource or 1

    def stream_launch(self, device: torch.device) -> None:
        """Return nothing: the host waits."""
        del device


@final
class HierarchicalLanes(AbstractLanes):
    """Finds the ranks of each host, and opens the lanes of both levels.

    If all ranks are on one host, or each is alone on its own, lanes are those of the
    one level that is left.
    """

    def __init__(
        self,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> None:
        self._ranks = ranks
        self._store_for = store_for
        self._end_requests = end_requests
        self._notes = notes
        self._layout: Layout | None = None
        self._local: LocalLanes | None = None
        self._across: GlooLanes | None = None
        self._flat: GlooLanes | None = None
        """Lanes over all ranks, for buckets whose plan names rings."""

        self._lanes: dict[tuple[int, int], HierarchicalLane] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of lanes within the host, by lane and connections."""
        self._opened = 0

    def open(self, needs: Sequence[Need]) -> dict[Need, Any]:
        """Return the lanes for one plan; collective."""
        layout = self._layout or self._find_layout()
        if layout.per_host == 1:
            assert self._across is not None  # noqa: S101
            return self._across.open(needs)
        if len(layout.hosts) == 1:
            assert self._local is not None  # noqa: S101
            return self._local.open(needs)
        connections = connections_of(needs)
        new = [key for key in connections.items() if key not in self._lanes]
        if new:
            self._open_new(layout, new)
        return {need: self._lanes[need[0], connections[need[0]]] for need in needs}

    def open_for(
        self, needs: Sequence[Need], algorithms: Container[str]
    ) -> dict[Need, Any]:
        """Return the lanes for a plan that chooses each bucket's algorithm; collective.

        With one level, each algorithm is the same.
        """
        found = self.open(needs)
        connections = connections_of(needs)
        bare = [
            key
            for key in connections.items()
            if key in self._lanes and not self._lanes[key].has_ring
        ]
        if "ring" in algorithms and bare:
            flat = self._flat or self._flat_lanes()
            self._flat = flat
            self._opened += 1
            rings = self._both(lambda: flat.open(bare), level=2)
            for key in bare:
                self._lanes[key].add_ring(rings[key])
        return found

    def _flat_lanes(self) -> GlooLanes:
        return GlooLanes(
            ranks=self._ranks,
            store_for=self._stores("all"),
            end_requests=self._end_requests,
            notes=PrefixStore("all", self._notes),
        )

    def _open_new(self, layout: Layout, keys: list[tuple[int, int]]) -> None:
        assert self._local is not None  # noqa: S101
        assert self._across is not None  # noqa: S101
        self._opened += 1
        local, across = self._local, self._across
        taken = {key[0] for key in self._lanes}
        self._numbers |= {key: _own_number(key, taken) for key in keys}
        lanes = self._both(
            lambda: local.open([(self._numbers[key], None) for key in keys]), level=0
        )
        others = self._both(lambda: across.open(keys), level=1)
        for key in keys:
            self._lanes[key] = HierarchicalLane(
                key[0],
                layout,
                lanes[self._numbers[key], None],
                others[key],
                weakly(self.abort),
            )

    def _both(
        self, opening: Callable[[], dict[Need, Any]], *, level: int
    ) -> dict[Need, Any]:
        """Open one level's lanes; raise on all ranks if a rank can't.

        Raises:
            CommTimeout: a rank is lost or late.
            PlanMismatch: a rank can't open a lane.
        """
        error: StrettoError | RuntimeError | None = None
        found: dict[Need, Any] = {}
        try:
            found = opening()
        except (StrettoError, RuntimeError) as exc:
            error = exc
        text = ""
        if error is not None:
            is_loss = not isinstance(error, PlanMismatch)
            text = f"{_LOSS if is_loss else ''}{error}"
        said = self._exchange(
            f"open {self._opened} {_LEVELS[level]}",
            text,
            purpose=f"open lanes {_LEVELS[level]}",
        )
        if error is not None:
            raise error
        for text in filter(None, said):
            if text.startswith(_LOSS):
                raise CommTimeout(text.removeprefix(_LOSS))
            raise PlanMismatch(text)
        return found

    def _exchange(self, name: str, text: str, *, purpose: str) -> list[str]:
        """Return what each rank says, in rank order.

        Raises:
            CommTimeout: a rank is lost or late.
        """
        # Not the lanes' store, whose requests end where an opening is given up.
        ranks, store = self._ranks, PrefixStore("hierarchical", self._notes)
        store.set(f"{name}/{ranks.rank}", text)
        keys = [f"{name}/{rank}" for rank in range(ranks.size)]
        missing = missing_after(ranks, store, keys)
        if missing is not None:
            why = missing.reason(ranks)
            raise CommTimeout(f"{ranks.name(ranks.rank)} can't {purpose}: {why}")
        return [store.get(key).decode() for key in keys]

    def _find_layout(self) -> Layout:
        """Compare hosts with the other ranks, and prepare both levels."""
        hosts = self._exchange("host", own_host(), purpose="find the ranks' hosts")
        layout = layout_of(hosts, self._ranks.rank)
        host, place = layout.host, layout.place
        if layout.per_host > 1:
            self._local = LocalLanes(
                ranks=self._part(layout.hosts[host]),
                store_for=self._stores(f"host {host}"),
                notes=PrefixStore(f"host {host}", self._notes),
            )
        if len(layout.hosts) > 1:
            self._across = GlooLanes(
                ranks=self._part(layout.across),
                store_for=self._stores(f"place {place}"),
                end_requests=self._end_requests,
                notes=PrefixStore(f"place {place}", self._notes),
            )
        self._layout = layout
        return layout

    def _part(self, members: Sequence[int]) -> Ranks:
        """Return this rank among some of the ranks."""
        ranks = self._ranks
        return dataclasses.replace(
            ranks,
            rank=list(members).index(ranks.rank),
            size=len(members),
            names=tuple(ranks.names[member] for member in members),
        )

    def _stores(self, part: str) -> Callable[[str], Store]:
        store_for = self._store_for
        return lambda name: store_for(f"{part}/{name}")

    def retain(self, lanes: Container[int]) -> None:
        """Release the other lanes; each ends with its last user."""
        for key in [key for key in self._lanes if key[0] not in lanes]:
            del self._lanes[key]
        for level in self._gloo_levels():
            level.retain(lanes)
        if self._local is not None:
            alone = self._layout is not None and len(self._layout.hosts) == 1
            kept = lanes if alone else {self._numbers[key] for key in self._lanes}
            self._local.retain(kept)

    def abort(self) -> None:
        """End every connection, and make every collective on shared memory fail."""
        for level in self._gloo_levels():
            level.abort()
        if self._local is not None:
            self._local.abort()

    def close(self) -> None:
        """End every lane after its collectives are done; does not wait for them."""
        for lane in self._lanes.values():
            lane.close()
        if not self._lanes and self._local is not None:
            self._local.close()
        self._lanes.clear()
        for level in self._gloo_levels():
            level.close()

    def _gloo_levels(self) -> list[GlooLanes]:
        return [level for level in (self._across, self._flat) if level is not None]


def _own_number(key: tuple[int, int], taken: Container[int]) -> int:
    """Return the number of a lane within the host.

    It is the lane's own, unless that is in use with another number of connections.
    """
    number, connections = key
    return number + (connections << 20) if number in taken else number
