"""Check that all ranks hold the same values of buffers that forward only reads.

All ranks get the first rank's buffers when a model is built. Later a program may change
them, in the same way on every rank: a shift, the factor of a schedule, a mask. A change
on one rank only trains another model. So each forward compares digests, which are
computed again when a buffer was written.

Buffers that forward changes, such as running statistics, and buffers in the memory of
a parameter are current only where their layer runs. They are not compared.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from stretto.burst.checks.numbers import number_of
from stretto.burst.checks.tolerances import of_copies
from stretto.burst.memory import bytes_of
from stretto.burst.tracing.overlap import regions_of
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.burst.tracing.layers import LayerGraph
    from stretto.runtime.agreement import Ranks

_MAX_READ = 1 << 13
"""Bytes of the largest buffers of which one is read in each forward, for writes
through ``.data``, which do not change the version."""


@final
class ConstantBuffers:
    """The buffers of one model that its layers read and do not change.

    ``gather`` returns every rank's text. All ranks call it if their digests differ.
    """

    num_values: ClassVar[int] = 1

    def __init__(self, ranks: Ranks, gather: Callable[[str], Sequence[str]]) -> None:
        self._ranks = ranks
        self._gather = gather
        self._graph: LayerGraph | None = None
        self._changed: set[int] = set()
        """Ids of buffers that the forward of some capture changes, or an optimizer."""
        self._rows: list[_Buffer] = []
        self._small: list[_Buffer] = []
        self._turn = 0
        self._digest = 0
        self._accepted: set[tuple[int, ...]] = set()

    def watch(self, graph: LayerGraph) -> None:
        """Compare the buffers of this plan's layers from now on."""
        self._use(graph)
        self._accepted.clear()

    def follow(self, graph: LayerGraph) -> None:
        """Compare the buffers of the capture that runs next."""
        if self._ranks.size > 1 and graph is not self._graph:
            self._use(graph)

    @torch.no_grad()
    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange."""
        if self._ranks.size == 1:
            return [0] * self.num_values
        is_new = False
        for row in self._rows:
            is_new |= row.was_written()
        if self._small and not is_new:
            self._turn += 1
            is_new = self._small[self._turn % len(self._small)].differs()
        if is_new:
            self._digest = number_of(b"".join(row.digest for row in self._rows))
        return [self._digest]

    def _use(self, graph: LayerGraph) -> None:
        self._graph = graph
        # Also where this capture only reads them, in evaluation.
        changed = [t for node in graph.nodes for t in node.trained_and_changed()]
        buffers = [pair for node in graph.nodes for pair in node.module.named_buffers()]
        regions = regions_of((*changed, *(tensor for _, tensor in buffers)))
        written = {regions[id(tensor)] for tensor in changed}
        self._changed |= {id(t) for _, t in buffers if regions[id(t)] in written}
        found: dict[int, _Buffer] = {}
        for name, tensor in buffers:
            if id(tensor) not in self._changed:
                found.setdefault(id(tensor), _Buffer(name, tensor))
        self._rows = list(found.values())
        self._small = [row for row in self._rows if row.tensor.nbytes <= _MAX_READ]
        self._digest = 0

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged, the same on all ranks.

        Raises:
            RankDisagreement: on every rank, naming the buffer and the ranks.
        """
        found = tuple(row[0] for row in rows)
        if len(set(found)) == 1 or found in self._accepted:
            return
        mine = json.dumps([row.described() for row in self._rows])
        every = [json.loads(text) for text in self._gather(mine)]
        for number, row in enumerate(self._rows):
            first = every[0][number]
            for rank in range(1, self._ranks.size):
                if not _are_near(first, every[rank][number], row.tensor.dtype):
                    raise RankDisagreement(
                        f"{self._ranks.name_all((0, rank))} hold different values of "
                        f"buffer {row.name!r}, which forward reads: change it in the "
                        "same way on all ranks, or call refresh() to give all ranks "
                        "the first one's"
                    )
        self._accepted.add(found)


@final
class _Buffer:
    """A buffer, and its digest at a version."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.digest = b""
        self._state: tuple[int, int] | None = None

    def was_written(self) -> bool:
        """Return whether the buffer was written since the last call; update it."""
        tensor = self.tensor
        version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        state = (tensor.data_ptr(), version)
        if state == self._state:
            return False
        self._state = state
        self.differs()
        return True

    def differs(self) -> bool:
        """Return whether the values differ from the last ones; update the digest."""
        found = hashlib.blake2b(bytes_of(self.tensor), digest_size=16).digest()
        is_other = found != self.digest
        self.digest = found
        return is_other

    def described(self) -> list[Any]:
        """Return a digest, and sums of the values that show how near others are."""
        values = self.tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        line = values.double().cpu().reshape(-1).nan_to_num()
        weights = torch.arange(len(line), dtype=torch.float64).mul_(0.7).sin_()
        sums = [float(line.abs().sum()), float(line @ weights)]
        return [self.digest.hex(), *sums]


def _are_near(one: Sequence[Any], other: Sequence[Any], dtype: torch.dtype) -> bool:
    if one[0] == other[0]:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    bound = of_copies(dtype) * max(one[1], other[1])
    return all(abs(a - b) <= bound for a, b in zip(one[1:], other[1:], strict=True))
