"""A layer graph as chains and blocks: the parse of a series-parallel graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.schema.burst import LayerProfile


class Crossing(SpecError):
    """The layers are not series-parallel."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The output of layer ``source`` goes to layer ``target``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Block:
    """Branches between layer ``source`` and layer ``target``, by their first layer."""

    source: int
    target: int
    branches: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers ``nodes`` one after another, ``links[i]`` leading to ``nodes[i]``.

    One more link leads to the layer after the chain; the ends are not part of it.
    """

    nodes: tuple[int, ...]
    links: tuple[Edge | Block, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The whole graph: its first layer, its last, and the chain between them."""

    source: int
    target: int
    chain: Chain | None
    """``None`` for a single layer."""


def parse(profile: LayerProfile) -> Tree:
    """Return the series-parallel structure of a profile's layers, in O(V + E).

    Repeatedly, a layer with one edge in and one out becomes part of one longer edge,
    and edges between the same two layers become a block (Valdes, Tarjan and Lawler,
    SIAM J. Comput. 11(2), 1982).

    Raises:
        SpecError: there are several first or last layers, or the graph is not
            series-parallel; the message names the layers in the way.
    """
    number = {layer.name: i for i, layer in enumerate(profile.layers)}
    into: list[dict[int, Chain]] = [{} for _ in profile.layers]
    out: list[dict[int, Chain]] = [{} for _ in profile.layers]
    for i, layer in enumerate(profile.layers):
        for name in layer.inputs:
            edge = Chain((), (Edge(number[name], i),))
            into[i][number[name]] = out[number[name]][i] = edge
    source = _only_one(profile, [i for i, e in enumerate(into) if not e], "first")
    target = _only_one(profile, [i for i, e in enumerate(out) if not e], "last")
    if source == target:
        return Tree(source, target, None)

    work = list(range(len(into) - 1, -1, -1))
    while work:
        node = work.pop()
        if len(into[node]) != 1 or len(out[node]) != 1:
            continue
        (before, left), (after, right) = (*into[node].items(), *out[node].items())
        into[node].clear()
        out[node].clear()
        del out[before][node], into[after][node]
        chain = Chain((*left.nodes, node, *right.nodes), (*left.links, *right.links))
        if after in out[before]:
            chain = _beside(before, after, out[before][after], chain)
            work += [after, before]
        out[before][after] = into[after][before] = chain
    left_over = [i for i in range(len(into)) if i not in (source, target) and into[i]]
    if left_over:
        names = ", ".join(repr(profile.layers[i].name) for i in left_over)
        raise Crossing(
            f"the layers of {profile.name!r} are not series-parallel: {names} join and "
            "part across one another. Merge them into one layer of the profile, or "
            "leave out the edge that crosses",
            place=".layers",
        )
    return Tree(source, target, out[source][target])


def _only_one(profile: LayerProfile, found: list[int], which: str) -> int:
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(profile.layers[i].name) for i in found)
    raise SpecError(
        f"a profile needs one {which} layer, but {profile.name!r} has {len(found)}: "
        f"{names}. Add a layer without computation that joins them",
        place=".layers",
    )


def _beside(source: int, target: int, one: Chain, other: Chain) -> Chain:
    """Return two chains between the same layers as one block; open blocks in them."""
    branches: list[Chain] = []
    for chain in (one, other):
        only = chain.links[0]
        if not chain.nodes and isinstance(only, Block):
            branches += only.branches
        else:
            branches.append(chain)
    branches.sort(key=lambda chain: chain.nodes or (-1,))
    return Chain((), (Block(source, target, tuple(branches)),))
