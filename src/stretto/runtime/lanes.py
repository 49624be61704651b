"""Lanes: communicators that carry collectives at the same time.

Collectives on one lane start in launch order; lanes run beside each other. A lane is a
backend of its own over the ranks of the model's process group, not a
``dist.new_group``: that asks every process of the job to take part, takes no Gloo
options, and keeps the group until the job ends.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.runtime.agreement import end_requests, own_connection
from stretto.runtime.lanes_gloo import GlooLanes
from stretto.runtime.lanes_gloo import check_here as check_gloo
from stretto.runtime.lanes_nccl import NcclLanes
from stretto.runtime.lanes_nccl import check_here as check_nccl

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from stretto.runtime.agreement import Ranks
    from stretto.schema import Plan

Need = tuple[int, int | None]
"""A lane and the resource that a collective on it may take."""


def needs_of(plan: Plan) -> tuple[Need, ...]:
    """Each lane with each resource that a plan asks of it, in the plan's order."""
    needs = {
        ((bucket.lane + i) % plan.lanes, bucket.resource): None
        for bucket in plan.buckets
        for i in range(min(bucket.slices, plan.lanes))
    }
    return tuple(needs)


def check_lanes(plan: Plan, backend: str, device: torch.device) -> None:
    """Requires that this process can open what a plan asks for.

    Raises:
        PlanMismatch: naming what is too much or in the way, both numbers, and the way
            out.
    """
    check = check_nccl if backend == "nccl" else check_gloo
    check(needs_of(plan), plan.ranks, device)


@final
class LanePool:
    """Lanes of one model, opened when a plan first asks for them and kept.

    Opening is collective: every rank must ask for the same in the same order. A pool
    keeps what it opened, so that going back to an earlier plan costs nothing; how many
    it keeps is bounded by the lanes and levels of resource that plans use. `retain`
    releases some; `close`, or the end of the last reference, ends them all.
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

        kind: Any = NcclLanes if backend == "nccl" else GlooLanes
        self._lanes: Any = kind(ranks=ranks, store_for=store_for, device=device)
        if backend != "nccl" and store is not ranks.store:
            self._lanes.end_requests = partial(end_requests, store)
        self._close = weakref.finalize(self, self._lanes.close)
        # A process that ends must end NCCL's communicators while the driver is there.
        # Gloo's would wait for what is under way, which may be for a peer that failed.
        self._close.atexit = backend == "nccl"

    def open(self, needs: Iterable[Need]) -> dict[Need, Any]:
        """The backends that carry what one plan asks of its lanes."""
        opened: dict[Need, Any] = self._lanes.open(tuple(dict.fromkeys(needs)))
        return opened

    def lane(self, number: int, resource: int | None = None) -> Any:
        """The backend of a lane on its own."""
        return self.open([(number, resource)])[number, resource]

    def retain(self, needs: Iterable[Need]) -> None:
        """Release the lanes that ``needs`` does not name; on every rank alike.

        A lane ends with its last user. No collective may be in flight on those that
        end: all ranks must have agreed on something since their last one.
        """
        self._lanes.retain({lane for lane, _ in needs})

    def abort(self) -> None:
        """Ends every connection, so that no peer waits for this rank any longer."""
        self._lanes.abort()

    def close(self) -> None:
        """Ends every lane, once its collectives are done."""
        self._close()
