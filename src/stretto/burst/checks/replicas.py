"""Check that the ranks of a layer hold the same parameters, a few at a time.

Ranks of a layer get the same gradients, so their copies stay equal as long as every
rank takes the same steps. A norm over one rank's gradients, an exponential average or a
learning rate that differs by rank lets them drift apart; the result is then not a
consistent model. Each forward compares a few values of one layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, final

import torch

from stretto.burst.checks.numbers import as_float, as_int
from stretto.burst.checks.tolerances import of_copies
from stretto.burst.rank_groups import RankRange, is_among
from stretto.errors import RankDisagreement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.burst.tracing.layers import LayerGraph
    from stretto.runtime.agreement import Ranks

_VALUES = 4096
"""About this many values of a layer are compared at a time."""

_EVERY = {"cpu": 1}
_EVERY_ON_ACCELERATORS = 64
"""Interval of checks on accelerators, where reading values waits for the device."""

_Row = tuple[str, RankRange, list[torch.Tensor]]
"""A layer, its ranks, and its parameters."""


@final
class Replicas:
    """The layers of one model that several ranks run."""

    num_values: ClassVar[int] = 2

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rows: list[_Row] = []
        self._turn = 0

    def watch(self, graph: LayerGraph, widths: Mapping[str, RankRange]) -> None:
        """Compare these layers from now on; every rank must pass the same."""
        self._turn = 0
        self._rows = []
        for node in graph.nodes:
            held: list[torch.Tensor] = [
                p
                for p in node.module.parameters()
                if (p.is_floating_point() or p.is_complex()) and p.numel()
            ]
            if held and widths[node.name][1] > 1:
                self._rows.append((node.name, widths[node.name], held))

    def next_values(self) -> list[int]:
        """Return `num_values` numbers to exchange, which differ if copies do."""
        self._turn += 1
        row = self._row()
        if row is None:
            return [0, 0]
        held = row[2]
        position = self._turn // len(self._rows)
        return [*self._values(row, position % len(held), position // len(held))]

    def require_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers that the ranks exchanged.

        Raises:
            RankDisagreement: on every rank, naming the layer and the ranks.
        """
        row = self._row()
        if row is not None:
            self._compare(row, [(total, size) for total, size in rows])

    def all_values(self) -> list[int]:
        """Return two numbers to exchange for each parameter that several ranks hold."""
        return [
            number
            for row in self._rows
            for index in range(len(row[2]))
            for number in self._values(row, index, 0)
        ]

    def require_all_equal(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the ranks' numbers from `all_values`.

        Raises:
            RankDisagreement: on every rank, naming the layer and the ranks.
        """
        at = 0
        for row in self._rows:
            for _ in row[2]:
                self._compare(row, [(each[at], each[at + 1]) for each in rows])
                at += 2

    def _values(self, row: _Row, index: int, position: int) -> tuple[int, int]:
        if not is_among(row[1], self._ranks.rank):
            return 0, 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            chunk = _chunk_of(row[2][index], position)
            return as_int(float(chunk.sum())), as_int(float(chunk.abs().sum()))

    def _compare(self, row: _Row, values: Sequence[tuple[int, int]]) -> None:
        name, (first, width), held = row
        every = [(as_float(s), as_float(m)) for s, m in values[first : first + width]]
        tolerance = of_copies(held[0].dtype)
        one, scale = every[0]
        for offset, (other, other_scale) in enumerate(every):
            bound = tolerance * max(scale, other_scale)
            near = abs(one - other) <= bound and abs(scale - other_scale) <= bound
            same = one == other or (math.isnan(one) and math.isnan(other))
            if not near and not same:
                raise RankDisagreement(
                    f"{self._ranks.name_all((first, first + offset))} hold different "
                    f"parameters of layer {name!r}, which both run: a step was not "
                    "the same on both. Clip with clip_grad_norm_, give all ranks one "
                    "learning rate, change parameters the same way on every rank, and "
                    "use no optimizer that reads all gradients together"
                )

    def _row(self) -> _Row | None:
        if not self._rows:
            return None
        row = self._rows[self._turn % len(self._rows)]
        every = _EVERY.get(row[2][0].device.type, _EVERY_ON_ACCELERATORS)
        return row if self._turn // len(self._rows) % every == 0 else None


def _chunk_of(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """Return some consecutive rows of a tensor, different ones at each position."""
    whole = tensor.detach()
    if whole.is_complex():
        whole = torch.view_as_real(whole.resolve_conj())
    if whole.dim() == 0:
        return whole.double()
    rows = max(1, _VALUES * len(whole) // whole.numel())
    start = position * rows % len(whole)
    return whole[start : start + rows].double()
