"""The negotiated engine: collectives in any order, from any thread, on every rank.

```text
 any thread ─ submit ─▶ ledger ◀─ rounds ─ control thread ─▶ control group ─▶ peers
                          │                     │
                          └─ ready everywhere ──┴─▶ sender ─▶ lane 0 ─▶ peers
                                                   packs,    lane 1
                                                   cuts      ...
                       handle ◀── ended ── a thread per lane
```

One thread negotiates and launches, so launch order is the agreed one on every rank. It
is `stretto.runtime.negotiated.ledger` that decides and `core` that moves.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from typing import TYPE_CHECKING, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import SpecError
from stretto.runtime.agreement import ranks_of
from stretto.runtime.negotiated.core import Core
from stretto.runtime.negotiated.options import EngineOptions
from stretto.runtime.negotiated.requests import Kind, Request
from stretto.runtime.negotiated.tensor_set import TensorSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from stretto.runtime.agreement import Ranks
    from stretto.runtime.negotiated.handles import Handle
    from stretto.runtime.negotiated.spans import AbstractEngineObserver


def members_of(ranks: Ranks, members: Sequence[int], name: str) -> Ranks:
    """Some of the ranks as ranks of their own, for an engine that only they open.

    ``members`` are ranks among ``ranks``, in the order of their new ranks; ``name`` is
    equal on all of them and differs from that of other such sets.

    Raises:
        SpecError: this process is not a member, or a member is no rank.
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
    """Collectives in any order from any thread, agreed on without a master.

    One per set of ranks; only these ranks construct it, all of them. Ranks match
    requests by name. Whatever differs fails on every rank with one text; a rank that is
    gone fails all that is pending with one `CommTimeout`.

    Args:
        ranks: Who takes part, and their store.
        options: Settings, equal on all ranks.
        observer: Is told what happens when.

    Raises:
        RankDisagreement: ranks came with different options or versions.
        CommTimeout: a rank did not come.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        options: EngineOptions | None = None,
        observer: AbstractEngineObserver | None = None,
    ) -> None:
        self._core = Core(ranks, options or EngineOptions(), observer)
        # Also at the interpreter's end, and when the last reference goes.
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
        """The engine of a process group's ranks, over the group's store.

        ``timeout_s`` is how long a request waits for other ranks before it fails;
        ``None``: as long as the group's collectives do.
        """
        ranks = ranks_of(group, timeout_s=timeout_s)
        return cls(ranks, options=options, observer=observer)

    @property
    def rank(self) -> int:
        """This process's rank among the engine's."""
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
        """Asks for a collective and returns at once.

        ``output`` takes the result and may be ``tensor`` itself; ``None``: a new tensor
        does. Neither may be touched before the handle has ended.

        Raises:
            SpecError: (a ValueError) the name is pending already, or a tensor is not as
                the request says.
            CommTimeout: the engine has failed before.
        """
        return self._core.submit([(request, tensor, output)])[0]

    def submit_group(
        self,
        group: str,
        rows: Sequence[tuple[Request, torch.Tensor | None, torch.Tensor | None]],
    ) -> list[Handle]:
        """Asks for several that are launched together or fail together.

        ``group`` must be the same on every rank, and so must the names in it.

        Raises:
            SpecError: as `submit`; then none of them is submitted.
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
        """Ends when every rank has called it."""
        return self.submit(Request(name=name, kind=Kind.BARRIER))

    def register(self, name: str, requests: Sequence[Request]) -> TensorSet:
        """Declares tensors that every rank submits once per step; waits for all ranks.

        Raises:
            SpecError: requests are not all-reduces with different names.
            RankDisagreement: ranks registered different tensors.
        """
        steps = self._core.register(name, requests)
        return TensorSet(self, steps, [request.name for request in requests])

    def join(self, timeout_s: float | None = None) -> int:
        """Contributes zeros to sums and averages until all ranks have joined.

        First waits for what this rank has pending. Returns the last rank to join.

        Raises:
            SpecError: a step of a tensor set has begun but is not complete.
        """
        return self._core.join(timeout_s)

    def close(self) -> None:
        """Ends threads and connections. What is pending fails, on peers too."""
        self._close()
