"""A rank's access to the backend under test, for the checks in `_backend_cases`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.runtime import backends
from stretto.runtime.agreement import Agreement
from stretto.runtime.lanes import LanePool
from stretto.runtime.store import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.runtime.ranks import Ranks


@final
class BackendBench:
    """A rank's access to the backend under test."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.device = device
        self.ranks = self.ranks_for(60.0)
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.is_on_host = backends.get(backend).completes_on_host
        self._pools = 0
        self._agreement = Agreement(self.ranks)

    def ranks_for(self, timeout_s: float) -> Ranks:
        """Return the ranks with a timeout."""
        world = dist.group.WORLD
        assert world is not None
        return ranks_of(world, timeout_s=timeout_s)

    def pool(self, timeout_s: float = 60.0) -> LanePool:
        """Return new lanes, none of them open."""
        self._pools += 1
        return LanePool(
            self.ranks_for(timeout_s),
            serial=f"contract/{self._pools}",
            backend=self.backend,
            device=self.device,
        )

    def values(self, dtype: torch.dtype, elements: int, rank: int) -> torch.Tensor:
        """Return a rank's values, the same wherever they are computed."""
        generator = torch.Generator().manual_seed(1000 * rank + elements)
        if dtype.is_floating_point:
            drawn = torch.randn(elements, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).to(self.device)
        drawn = torch.randint(0, 9, (elements,), generator=generator)
        return drawn.to(dtype).to(self.device)

    def all_values(self, dtype: torch.dtype, elements: int) -> list[torch.Tensor]:
        """Return the values of every rank."""
        return [self.values(dtype, elements, rank) for rank in range(self.size)]

    def require_same_bits(self, tensors: list[torch.Tensor]) -> None:
        """Require that all ranks hold the same bits."""
        digest = hashlib.sha256()
        for tensor in tensors:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(data.numpy().tobytes())
        digests = self._agreement.gather("compare bits", digest.hexdigest())
        assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"

    def meet(self) -> None:
        """Wait for the other ranks, not on the lanes."""
        self._agreement.gather("meet", "")

    def announce(self, event: str) -> None:
        """Let ranks in `wait_for` continue."""
        self._events().set(event, "")

    def wait_for(self, event: str, limit_s: float) -> None:
        """Wait until another rank has announced an event, or until a limit."""
        deadline = time.perf_counter() + limit_s
        while not self._events().check([event]) and time.perf_counter() < deadline:
            time.sleep(0.01)

    def _events(self) -> PrefixStore:
        return PrefixStore(f"contract/{self._pools}/events", self.ranks.store)

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Require that a block ends in time."""
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        assert took_s < limit_s, f"it took {took_s:.1f} s, more than {limit_s:g} s"


@dataclass(frozen=True, slots=True)
class Case:
    """A part of the contract."""

    check: Callable[[BackendBench], None]

    ranks: int = 2

    on_streams: bool = True
    """Whether it holds for backends whose completion only streams see."""

    dies: int | None = None
    """The rank whose process ends in the case."""
