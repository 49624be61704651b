"""Packing and cutting: decide which tensors share a unit, its parts and its lane."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Row(NamedTuple):
    """A tensor to reduce."""

    position: int
    """The caller's index of the tensor."""

    like: Hashable
    """Only tensors with an equal key share a unit."""

    elements: int

    element_bytes: int


class Piece(NamedTuple):
    """Elements ``start`` to ``end`` of a tensor."""

    position: int

    start: int

    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The content of one all-reduce."""

    lane: int

    pieces: tuple[Piece, ...]

    elements: int


@final
class LaneLoads:
    """Bytes assigned to each lane: the next unit goes to the lane with the fewest.

    The choice can't depend on which lane is free first, because that may differ between
    ranks: on one lane all ranks must send the same units in the same order.
    """

    def __init__(self, lanes: int) -> None:
        self._loads_bytes = [0] * lanes

    def take(self, size_bytes: int) -> int:
        """Return the lane for the next unit."""
        lane = self._loads_bytes.index(min(self._loads_bytes))
        self._loads_bytes[lane] += size_bytes
        return lane


def cut(rows: Sequence[Row], unit_bytes: int, loads: LaneLoads) -> list[Unit]:
    """Return units for tensors in this order, in the order in which they are complete.

    Tensors of one kind are joined while they fit into ``unit_bytes``; a larger one is
    cut into parts that differ by at most one element. Every element is in exactly one
    piece. Equal arguments give equal units, and every rank calls it with the same
    arguments.
    """
    units: list[Unit] = []
    open_pieces: dict[Hashable, list[Piece]] = {}
    open_elements: dict[Hashable, int] = {}

    def close(like: Hashable, element_bytes: int) -> None:
        pieces = open_pieces.pop(like, None)
        if pieces:
            elements = open_elements.pop(like)
            lane = loads.take(elements * element_bytes)
            units.append(Unit(lane=lane, pieces=tuple(pieces), elements=elements))

    bytes_of = {}
    for row in rows:
        bytes_of[row.like] = row.element_bytes
        size_bytes = row.elements * row.element_bytes
        if size_bytes > unit_bytes:
            for piece in _parts(row, unit_bytes):
                elements = piece.end - piece.start
                lane = loads.take(elements * row.element_bytes)
                units.append(Unit(lane=lane, pieces=(piece,), elements=elements))
            continue
        already = open_elements.get(row.like, 0)
        if already and (already + row.elements) * row.element_bytes > unit_bytes:
            close(row.like, row.element_bytes)
            already = 0
        open_pieces.setdefault(row.like, []).append(
            Piece(row.position, 0, row.elements)
        )
        open_elements[row.like] = already + row.elements
    for like in list(open_pieces):
        close(like, bytes_of[like])
    return units


def _parts(row: Row, unit_bytes: int) -> list[Piece]:
    most = max(1, unit_bytes // row.element_bytes)
    number = -(-row.elements // most)
    share, more = divmod(row.elements, number)
    bounds = [i * share + min(i, more) for i in range(number + 1)]
    return [
        Piece(row.position, start, end) for start, end in itertools.pairwise(bounds)
    ]
