"""The negotiated engine: collectives in any order, from any thread, on every rank.

```text
 any thread ─ submit ─▶ ledger ◀─ rounds ─ control thread ─▶ control group ─▶ peers
                          │                     │
                          └─ ready everywhere ──┴─▶ sender ─▶ lane 0 ─▶ peers
                                                   packs,    lane 1
                                                   cuts      ...
                       handle ◀── ended ── a thread per lane
```

One thread negotiates and launches, so launch order is the agreed one on every rank.
`stretto.runtime.negotiated.ledger` decides and `control_thread` executes.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import SpecError
from stretto.runtime.negotiated.api import EngineOptions
from stretto.runtime.negotiated.control_thread import ControlLoop
from stretto.runtime.negotiated.requests import CollectiveKind, Request
from stretto.runtime.negotiated.tensor_set import TensorSet
from stretto.runtime.store import ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from stretto.errors import StrettoError
    from stretto.runtime.negotiated.api import AbstractEngineObserver, Handle
    from stretto.runtime.ranks import Ranks


def members_of(ranks: Ranks, members: Sequence[int], name: str) -> Ranks:
    """Return some of the ranks as ranks of their own, for an engine only they open.

    ``members`` are ranks among ``ranks``, in the order of their new ranks; ``name`` is
    equal on all of them and unique among such sets.

    Raises:
        SpecError: this process is not a member, or a member is not a valid rank.
    """
    if ranks.rank not in members or not set(members) <= set(range(ranks.size)):
        raise SpecError(
            f"{ranks.name(ranks.rank)} must be one of the members, which must be ranks "
            f"from 0 to {ranks.size - 1}, got {list(members)}"
        )
    return dataclasses.replace(
        ranks,
        rank=list(members).index(ranks.rank),
        size=len(members),
        names=tuple(ranks.names[member] for member in members),
        store=PrefixStore(f"members/{name}", ranks.store),
    )


@final
class Engine:
    """Collectives in any order from any thread, agreed on without a coordinator.

    There is one engine per set of ranks; all of these ranks construct it, and no
    others. Ranks match requests by name. A request that differs between ranks fails on
    every rank with the same text; a lost rank fails all pending requests with one
    `CommTimeout`.

    Args:
        ranks: The participating ranks and their store.
        options: Settings, equal on all ranks.
        observer: Receives spans for a timeline.
        on_loss: If given, another part of the program knows which rank is lost and
            continues with the others: it is called at a failure instead of a search
            for the lost rank. Tensors must be on the CPU then.

    Raises:
        RankDisagreement: ranks have different options or versions.
        CommTimeout: a rank did not open its engine in time.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        options: EngineOptions | None = None,
        observer: AbstractEngineObserver | None = None,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        self._core = ControlLoop(ranks, options or EngineOptions(), observer, on_loss)
        # Also runs at interpreter exit, and when the last reference is dropped.
        self._close = weakref.finalize(self, self._core.close)

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup,
        *,
        options: EngineOptions | None = None,
        timeout_s: float | None = None,
        observer: AbstractEngineObserver | None = None,
    ) -> Engine:
        """Create the engine of a process group's ranks, over the group's store.

        ``timeout_s`` is how long a request waits for other ranks before it fails;
        ``None`` means the timeout of the group's collectives.
        """
        ranks = ranks_of(group, timeout_s=timeout_s)
        return cls(ranks, options=options, observer=observer)

    @property
    def rank(self) -> int:
        """This process's rank in the engine."""
        return self._core.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._core.ranks.size

    def submit(
        self,
        request: Request,
        tensor: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> Handle:
        """Submit a collective and return at once.

        ``output`` receives the result and may be ``tensor`` itself; ``None`` means a
        new tensor. Do not touch either before the handle has ended.

        Raises:
            SpecError: (a ValueError) the name is already pending, or a tensor does not
                match the request.
            CommTimeout: the engine has already failed.
        """
        return self._core.submit([(request, tensor, output)])[0]

    def submit_group(
        self,
        group: str,
        rows: Sequence[tuple[Request, torch.Tensor | None, torch.Tensor | None]],
    ) -> list[Handle]:
        """Submit several collectives that are launched together or fail together.

        ``group`` must be the same on every rank, and so must the names in it.

        Raises:
            SpecError: as in `submit`; then none of them is submitted.
        """
        names = sorted(request.name for request, _, _ in rows)
        digest = zlib.crc32("\0".join(names).encode())
        label = f"{group} ({len(rows)} tensors, {digest:08x})"
        return self._core.submit(
            [
                (
                    dataclasses.replace(r, group=label, group_size=len(rows)),
                    tensor,
                    output,
                )
                for r, tensor, output in rows
            ]
        )

    def barrier(self, name: str = "barrier") -> Handle:
        """Submit a barrier, which ends when every rank has submitted it."""
        return self.submit(Request(name=name, kind=CollectiveKind.BARRIER))

    def register(
        self, name: str, requests: Sequence[Request], *, sequence: str = ""
    ) -> TensorSet:
        """Declare tensors that every rank submits once per step; wait for all ranks.

        Args:
            name: Equal on all ranks.
            requests: The all-reduces of a step.
            sequence: As in `Request`: every rank registers and steps the sets of a
                sequence one after the other, in the same order.

        Raises:
            SpecError: the requests are not all-reduces with distinct names.
            RankDisagreement: ranks registered different tensors.
        """
        steps = self._core.register(name, requests, sequence)
        return TensorSet(self, steps, [request.name for request in requests])

    def join(self, timeout_s: float | None = None) -> int:
        """Contribute zeros to sums and averages until all ranks have joined.

        Wait for this rank's pending requests first. Return the last rank to join.

        Raises:
            SpecError: a step of a tensor set has begun but is not complete.
        """
        return self._core.join(timeout_s)

    def abort(self, error: StrettoError) -> None:
        """Make everything fail that is under way or comes later; from any thread.

        An earlier error of the engine's stays. `close` must follow.
        """
        self._core.abort(error)

    def close(self) -> None:
        """End threads and connections. Pending requests fail, on peers too."""
        self._close()
