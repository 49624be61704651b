"""Lanes: collectives on one lane run in order, those on different lanes concurrently.

Collectives on one lane start in launch order; lanes run in parallel. A lane is a
backend of its own over the ranks of the model's process group, not a
``dist.new_group``: that needs every process of the job to take part, accepts no Gloo
options, and keeps the group until the job ends.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.runtime import backends
from stretto.runtime.store import end_requests, own_connection

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import torch

    from stretto.runtime.backends.base import Need
    from stretto.runtime.ranks import Ranks
    from stretto.schema import Plan


def needs_of(plan: Plan) -> tuple[Need, ...]:
    """Return each lane with each resource that a plan needs of it, in plan order."""
    needs = {
        ((bucket.lane + i) % plan.lanes, bucket.resource): None
        for bucket in plan.buckets
        for i in range(min(bucket.slices, plan.lanes))
    }
    return tuple(needs)


def check_lanes(plan: Plan, backend: str, device: torch.device) -> None:
    """Require that this process can open the lanes of a plan.

    Raises:
        PlanMismatch: with the obstacle, both numbers, and the remedy.
    """
    backends.get(backend).check(needs_of(plan), plan.ranks, device)


@final
class LanePool:
    """Lanes of one model, opened when a plan first asks for them and kept.

    Opening is collective: every rank must ask for the same lanes in the same order. A
    pool keeps the lanes that it opened, so that a return to an earlier plan costs
    nothing; their number is bounded by the lanes and resource levels that plans use.
    `retain` releases some; `close`, or the end of the last reference, ends them all.
    """

    def __init__(
        self, ranks: Ranks, *, serial: int | str, backend: str, device: torch.device
    ) -> None:
        # Connecting waits in the store. See Note [One connection per thread that may
        # block].
        store = ranks.store
        if ranks.size > 1:
            store = own_connection(ranks)

        def store_for(name: str) -> PrefixStore:
            return PrefixStore(f"lanes/{serial}/{name}", store)

        kind = backends.get(backend)
        own = store is not ranks.store
        self._lanes = kind.lanes(
            ranks=ranks,
            store_for=store_for,
            device=device,
            end_requests=partial(end_requests, store) if own else None,
            notes=PrefixStore(f"lanes/{serial}/failed", ranks.store),
        )
        self._close = weakref.finalize(self, self._lanes.close)
        self._close.atexit = kind.ends_at_exit

    def open(
        self, needs: Iterable[Need], algorithms: Container[str] = ()
    ) -> dict[Need, Any]:
        """Return the backends for one plan's lanes.

        ``algorithms`` are those that its slices name, if they name any.
        """
        wanted = tuple(dict.fromkeys(needs))
        if not algorithms:
            return self._lanes.open(wanted)
        return self._lanes.open_for(wanted, algorithms)

    def lane(self, number: int, resource: int | None = None) -> Any:
        """Return the backend of a single lane."""
        return self.open([(number, resource)])[number, resource]

    def retain(self, needs: Iterable[Need]) -> None:
        """Release the lanes that ``needs`` does not name; the same on every rank.

        A lane ends with its last user. No collective may be in flight on a lane that
        ends: all ranks must have agreed on something since its last collective.
        """
        self._lanes.retain({lane for lane, _ in needs})

    def abort(self) -> None:
        """End every connection, so that no peer waits for this rank."""
        self._lanes.abort()

    def close(self) -> None:
        """End every lane after its collectives are done."""
        self._close()


@final
@dataclass(frozen=True, slots=True)
class ResourceLaunch:
    """Launches all-reduces of a resource on lane 0 of a pool."""

    pool: LanePool

    resource: int

    cut: bool
    """Whether the message is cut into as many pieces, as on Gloo."""

    def __call__(self, message: torch.Tensor) -> list[Any]:
        """Launch the all-reduce of a message, in place; return its works."""
        lane = self.pool.lane(0, self.resource)
        pieces = message.chunk(self.resource) if self.cut else (message,)
        return [lane.allreduce([piece]) for piece in pieces]
