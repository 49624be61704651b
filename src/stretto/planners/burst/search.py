"""The shortest step of a series-parallel graph, exact.

A chain is a shortest path over widths. A block of branches becomes one table, by the
widths of the layers before and after it. In a block some branches take turns on the
GPUs of the layer before it (their times add). Each other branch has its own GPUs (the
longest counts). The GPUs of all that run at once are at most those of the block.

Ignoring that last rule first gives lower bounds. Then only those entries of the tables
that a shortest path uses are computed with it, until a shortest path uses only such
entries.

Arrays carry a suffix: r rows, h widths before, k widths after, p capacities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from stretto.errors import SpecError
from stretto.planners.burst.edges import EdgeCost, min_plus
from stretto.planners.burst.problem import Choice
from stretto.planners.burst.sharing import (
    BranchTimes,
    in_turns,
    longest,
    share_all,
    shared,
    sum_of,
)
from stretto.planners.burst.tree import Block, Chain, Edge

if TYPE_CHECKING:
    from stretto.planners.burst.problem import BurstProblem, Floats, Ints

_MAX_BRANCHES = 10

_GROUP = 6
"""Widths that are bounded together."""

_LOOSE = 1.02
"""A block whose time exceeds its bound by this ratio gets bounds for groups."""

_MAX_GROUPED = 256
"""Largest number of widths for which groups are bounded."""


def shortest(problem: BurstProblem) -> tuple[float, Choice] | None:
    """Return time and choice of the fastest plan, ``None`` if none keeps the limit."""
    return _Search(problem).solve()


@dataclass(frozen=True, slots=True)
class _Moves:
    """Whether a chain's first and last edge lead to and from other GPUs."""

    into: bool = False
    out: bool = False

    def of(self, chain: Chain, link: int) -> _Moves:
        """Return the moves of one link of a chain."""
        return _Moves(self.into and link == 0, self.out and link == len(chain.nodes))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The best times through a block between two widths."""

    time_s: float
    home: list[int]
    """Branches that take turns."""

    away: list[int]
    gpus: list[int]
    """GPUs of the branches that take turns together, then of each beside them."""


_STAY, _MOVE = _Moves(), _Moves(into=True, out=True)


@final
class _Search:
    def __init__(self, problem: BurstProblem) -> None:
        self._problem = problem
        self._count = len(problem.widths)
        self._widths = np.array(problem.widths, np.int64)
        self._node_s = problem.node_s
        self._edges: dict[tuple[int, int, bool], EdgeCost] = {}
        self._free: dict[tuple[int, _Moves], Floats] = {}
        self._full: dict[tuple[int, _Moves], tuple[Ints, Floats]] = {}
        self._grids: dict[int, Ints] = {}
        self._kept: dict[tuple[int, _Moves], Floats] = {}
        self._columns: dict[tuple[int, range, _Moves], Floats] = {}
        self._to: dict[tuple[int, _Moves, int], tuple[Ints, Floats]] = {}
        self._states: dict[tuple[int, range, _Moves], list[Floats]] = {}
        self._splits_of: dict[int, list[tuple[list[int], list[int]]]] = {}
        self._node_at = [0] * len(problem.profile.layers)
        self._first = [0] * len(problem.profile.layers)
        self._own: set[int] = set()

    # the whole graph

    def solve(self) -> tuple[float, Choice] | None:
        problem, tree = self._problem, self._problem.tree
        start_s = np.where(
            problem.slack_s[tree.source] >= 0, self._node_s[tree.source], np.inf
        )
        if tree.chain is None:
            at = int(start_s.argmin())
            best_s = float(start_s[at])
            return None if math.isinf(best_s) else (best_s, Choice(widths=(at,)))
        chain = tree.chain
        tables = [
            self._block_free(link, _STAY).copy() if isinstance(link, Block) else None
            for link in chain.links
        ]
        exact: dict[tuple[int, int, int], float] = {}
        loose: set[int] = set()
        grouped: set[tuple[int, range, range]] = set()
        known_s = math.inf
        while True:
            path, best_s = self._path(chain, start_s, tables, tree.target)
            if math.isinf(best_s):
                return None
            found = [
                (i, path[i], path[i + 1])
                for i, table in enumerate(tables)
                if table is not None and (i, path[i], path[i + 1]) not in exact
            ]
            if not found:
                break
            if self._bound_groups(chain, tables, found, exact, loose, grouped):
                continue
            # A pair that raises the path above a known plan's time needs no exact time.
            path_s, spare_s = best_s, (known_s - best_s) + 1e-9 * best_s
            for i, head, tail in found:
                link, table = chain.links[i], tables[i]
                if isinstance(link, Block) and table is not None:
                    bound_s = float(table[head, tail])
                    below_s = bound_s + spare_s
                    pair = self._pair(
                        link, _only(head), _only(tail), problem.gpus, _STAY, below_s
                    )
                    table[head, tail] = pair.time_s
                    path_s += pair.time_s - bound_s
                    exact[i, head, tail] = pair.time_s
                    if pair.time_s > _LOOSE * bound_s:
                        loose.add(i)
            known_s = min(known_s, path_s)
        for node, at in zip(
            (tree.source, *chain.nodes, tree.target), path, strict=True
        ):
            self._node_at[node] = at
        for i, link in enumerate(chain.links):
            if isinstance(link, Block):
                self._place_block(link, path[i], path[i + 1], problem.gpus, _STAY, 0)
        choice = Choice(
            widths=tuple(self._node_at),
            own=frozenset(self._own),
            first_gpus=tuple(self._first),
        )
        return best_s, choice

    def _bound_groups(
        self,
        chain: Chain,
        tables: list[Floats | None],
        found: list[tuple[int, int, int]],
        exact: dict[tuple[int, int, int], float],
        loose: set[int],
        grouped: set[tuple[int, range, range]],
    ) -> bool:
        """Raise the bounds of pairs and those near them; return whether any was raised.

        One bound for a group of pairs costs as much as the exact time of one of them,
        so only those of the ``loose`` links are raised. If a branch ends with a block,
        the group has one width after it.
        """
        more = False
        if not _GROUP < self._count <= _MAX_GROUPED:
            return more
        for i, head, tail in found:
            link, table = chain.links[i], tables[i]
            if i not in loose or table is None or not isinstance(link, Block):
                continue
            if any(isinstance(c.links[0], Block) for c in link.branches):
                continue
            heads, tails = _group(head, self._count), _group(tail, self._count)
            if any(isinstance(c.links[-1], Block) for c in link.branches):
                tails = _only(tail)
            if (i, heads, tails) not in grouped:
                grouped.add((i, heads, tails))
                pair = self._pair(link, heads, tails, self._problem.gpus, _STAY)
                part_hk = table[heads.start : heads.stop, tails.start : tails.stop]
                np.maximum(part_hk, pair.time_s, out=part_hk)
                for at in exact:
                    if at[0] == i and at[1] in heads and at[2] in tails:
                        table[at[1], at[2]] = exact[at]
                more = True
        return more

    def _path(
        self,
        chain: Chain,
        start_s: Floats,
        tables: list[Floats | None],
        target: int,
    ) -> tuple[list[int], float]:
        """Return the widths of a shortest path over the layers of the top chain."""
        times = [start_s]
        for i, link in enumerate(chain.links):
            node = chain.nodes[i] if i < len(chain.nodes) else target
            table = tables[i]
            if isinstance(link, Edge):
                arrive_s = self._edge(link, moved=False).relax(times[-1][None, :])[0]
            elif table is not None:
                arrive_s = (times[-1][:, None] + table).min(axis=0)
            times.append(arrive_s + self._node_s[node])
        at = int(times[-1].argmin())
        best_s, path = float(times[-1][at]), [at]
        for i in reversed(range(len(chain.links))):
            link, table = chain.links[i], tables[i]
            if isinstance(link, Edge):
                cost_h = self._edge(link, moved=False).column(at)
            elif table is not None:
                cost_h = table[:, at]
            at = int((times[i] + cost_h).argmin())
            path.append(at)
        return path[::-1], best_s

    # chains

    def _edge(self, edge: Edge, *, moved: bool) -> EdgeCost:
        key = (edge.source, edge.target, moved)
        if key not in self._edges:
            self._edges[key] = EdgeCost(
                self._problem, edge.source, edge.target, moved=moved
            )
        return self._edges[key]

    def _chain(
        self,
        chain: Chain,
        heads: Ints,
        caps: Ints | None,
        moves: _Moves,
        kept: list[Floats] | None = None,
    ) -> Floats:
        """Return times from each row's width before the chain to each width after it.

        ``caps`` are the GPUs each row has; ``None``: blocks have as many as they want.
        ``kept`` receives the times after each layer; the last link is then left out.
        """
        times_rk: Floats | None = None
        closed_rh = None if caps is None else self._widths[None, :] > caps[:, None]
        for i, link in enumerate(chain.links):
            if kept is not None and i == len(chain.nodes) > 0:
                break
            part = moves.of(chain, i)
            times_rk = self._link(link, times_rk, heads, caps, part)
            if i < len(chain.nodes):
                times_rk = times_rk + self._node_s[chain.nodes[i]]
                if closed_rh is not None:
                    times_rk[closed_rh] = np.inf
                if kept is not None:
                    kept.append(times_rk)
        if times_rk is None:
            raise AssertionError("a chain has a link")
        return times_rk

    def _link(
        self,
        link: Edge | Block,
        times_rh: Floats | None,
        heads: Ints,
        caps: Ints | None,
        moves: _Moves,
    ) -> Floats:
        if isinstance(link, Edge):
            edge = self._edge(link, moved=moves.into or moves.out)
            if times_rh is None:
                return np.asfortranarray(edge.dense_hk[heads])
            return edge.relax(times_rh)
        if caps is None:
            table_hk = self._block_free(link, moves)
            return table_hk[heads] if times_rh is None else min_plus(times_rh, table_hk)
        grid, full_phk = self._block_full(link, moves)
        at = np.searchsorted(grid, caps, side="right") - 1
        if times_rh is None:
            out_rk = full_phk[at, heads]
            out_rk[at < 0] = np.inf
            return out_rk
        out_rk = np.full_like(times_rh, np.inf)
        for p in np.unique(at[at >= 0]):
            rows = at == p
            out_rk[rows] = min_plus(times_rh[rows], full_phk[p])
        return out_rk

    def _grid(self, chain: Chain) -> Ints:
        """Return the numbers of GPUs that make a difference to a chain."""
        key = id(chain)
        if key not in self._grids:
            sizes = {0} if not chain.nodes else set(self._problem.widths)
            for link in chain.links:
                if isinstance(link, Block):
                    sizes |= set(self._block_grid(link).tolist())
            self._grids[key] = np.array(sorted(sizes), np.int64)
        return self._grids[key]

    def _block_grid(self, block: Block) -> Ints:
        if id(block) in self._grids:
            return self._grids[id(block)]
        sums = {0}
        for chain in block.branches:
            grid = self._grid(chain).tolist()
            sums |= {a + b for a in sums for b in grid if a + b <= self._problem.gpus}
        self._grids[id(block)] = np.array(sorted(sums - {0}), np.int64)
        return self._grids[id(block)]

    # blocks

    def _splits(self, block: Block) -> list[tuple[list[int], list[int]]]:
        """Return each split of the branches: those in turns, those beside them."""
        key, count = id(block), len(block.branches)
        if key in self._splits_of:
            return self._splits_of[key]
        if count > _MAX_BRANCHES:
            layers = self._problem.profile.layers
            raise SpecError(
                f"at most {_MAX_BRANCHES} branches may start at a layer, but "
                f"{layers[block.source].name!r} has {count}: merge some of them",
                place=".layers",
            )
        splits = []
        for beside in range(2**count - 1):
            away = [b for b in range(count) if beside >> b & 1]
            if all(block.branches[b].nodes for b in away):
                home = [b for b in range(count) if not beside >> b & 1]
                splits.append((home, away))
        self._splits_of[key] = splits
        return splits

    def _block_free(self, block: Block, moves: _Moves) -> Floats:
        """Return times by both widths without a limit of capacity: a lower bound."""
        key = (id(block), moves)
        if key not in self._free:
            heads = np.arange(self._count)
            turns = [self._chain(c, heads, None, moves) for c in block.branches]
            beside = [self._chain(c, heads, None, _MOVE) for c in block.branches]
            best_hk = np.full((self._count, self._count), np.inf)
            for home, away in self._splits(block):
                np.minimum(best_hk, longest(turns, beside, home, away), out=best_hk)
            self._free[key] = best_hk
        return self._free[key]

    def _lanes(
        self, chain: Chain, head: range, tail: range, moves: _Moves
    ) -> tuple[BranchTimes, BranchTimes]:
        """Return a branch's times between two widths, in turns and on its own GPUs."""
        grid, last = self._grid(chain), chain.links[-1]
        if not chain.nodes:
            ends_h = self._into_any(last, tail, grid, moves)
            found = [ends_h[head.start : head.stop].min(keepdims=True)] * 2
        else:
            ends = [
                self._into_any(last, tail, grid, kind)
                for kind in (moves.of(chain, len(chain.nodes)), _Moves(out=True))
            ]
            if _is_one_layer(chain):
                found = [
                    np.minimum.accumulate(first_h + self._node_s[chain.nodes[0]] + end)
                    for first_h, end in zip(
                        self._firsts(chain, head, moves), ends, strict=True
                    )
                ]
            else:
                found = [
                    (state_rh + end).min(axis=1)
                    for state_rh, end in zip(
                        self._before_last(chain, head, moves), ends, strict=True
                    )
                ]
        gpus = grid.tolist()
        return BranchTimes(gpus, found[0].tolist()), BranchTimes(
            gpus, found[1].tolist()
        )

    def _firsts(self, chain: Chain, head: range, moves: _Moves) -> list[Floats]:
        """Return a first edge's times by width after it, in turns and to other GPUs."""
        link = chain.links[0]
        if not isinstance(link, Edge):
            raise TypeError("the chain starts with a block")
        return [
            self._edge(link, moved=moved).dense_hk[head.start : head.stop].min(axis=0)
            for moved in (moves.into, True)
        ]

    def _into_any(
        self, link: Edge | Block, tail: range, caps: Ints, moves: _Moves
    ) -> Floats:
        """Return the shortest times of `_into` over some widths."""
        key = (id(link), tail, moves)
        if isinstance(link, Block):
            return self._into(link, tail.start, caps, moves)
        if key not in self._columns:
            self._columns[key] = np.min(
                [self._into(link, at, caps, moves) for at in tail], axis=0
            )
        return self._columns[key]

    def _into(self, link: Edge | Block, tail: int, caps: Ints, moves: _Moves) -> Floats:
        """Return a last link's times to one width, by the width before it.

        For a block, by GPUs first.
        """
        if isinstance(link, Edge):
            return self._edge(link, moved=moves.into or moves.out).column(tail)
        grid, times_ph = self._block_to(link, moves, tail)
        at = np.searchsorted(grid, caps, side="right") - 1
        times_rh = times_ph[at]
        times_rh[at < 0] = np.inf
        return times_rh

    def _curve_at(self, chain: Chain, heads: Ints, moves: _Moves, tail: int) -> Floats:
        """Return times of a branch to one width, by its GPUs and widths before it."""
        grid, last = self._grid(chain), chain.links[-1]
        end = moves.of(chain, len(chain.nodes))
        if not chain.nodes:
            return self._into(last, tail, grid, end)[None, heads]
        if _is_one_layer(chain):
            # fast: what a layer may use with more GPUs is what it may use with fewer,
            # plus one width, so no table over the GPUs is needed.
            first_hw = self._link(chain.links[0], None, heads, None, moves.of(chain, 0))
            after_w = self._node_s[chain.nodes[0]] + self._into(last, tail, grid, end)
            times_ph: Floats = np.minimum.accumulate((first_hw + after_w).T, axis=0)
            return times_ph
        key = (id(chain), moves)
        if len(heads) != self._count:
            raise AssertionError("a curve is requested from every width")
        caps = np.repeat(grid, self._count)
        if key not in self._kept:
            kept: list[Floats] = []
            self._chain(chain, np.tile(heads, len(grid)), caps, moves, kept)
            self._kept[key] = kept[-1]
        times_r: Floats = (self._kept[key] + self._into(last, tail, caps, end)).min(
            axis=1
        )
        return times_r.reshape(len(grid), self._count)

    def _block_to(self, block: Block, moves: _Moves, tail: int) -> tuple[Ints, Floats]:
        """Return an inner block's times to one width by capacity and width before."""
        if (id(block), moves) in self._full:
            grid, full_phk = self._full[id(block), moves]
            return grid, full_phk[:, :, tail]
        key = (id(block), moves, tail)
        if key not in self._to:
            grid, heads = self._block_grid(block), np.arange(self._count)
            turns, beside = (
                [
                    (self._grid(c), self._curve_at(c, heads, kind, tail))
                    for c in block.branches
                ]
                for kind in (moves, _MOVE)
            )
            min_ph = np.full((len(grid), self._count), np.inf)
            for home, away in self._splits(block):
                lanes = [sum_of([turns[b] for b in home]), *(beside[b] for b in away)]
                share_all(lanes, grid, min_ph)
            self._to[key] = grid, min_ph
        return self._to[key]

    def _before_last(self, chain: Chain, head: range, moves: _Moves) -> list[Floats]:
        """Return times by GPUs and last layer's width, in turns and on its own GPUs."""
        key = (id(chain), head, moves)
        if key not in self._states:
            grid = self._grid(chain)
            heads, caps = np.full(2 * len(grid), head.start), np.tile(grid, 2)
            # fast: both kinds as rows of one array; only their end links differ.
            if isinstance(chain.links[0], Edge):
                firsts = np.array(self._firsts(chain, head, moves))
                rows_rh = np.repeat(firsts.T, len(grid), axis=1).T
            else:
                ends = [
                    self._link(
                        chain.links[0],
                        None,
                        heads[: len(grid)],
                        grid,
                        kind.of(chain, 0),
                    )
                    for kind in (moves, _MOVE)
                ]
                rows_rh = np.concatenate([end.T for end in ends], axis=1).T
            closed_hr = np.where(self._widths[:, None] > caps, np.inf, 0.0)
            for i, node in enumerate(chain.nodes):
                if i:
                    rows_rh = self._link(chain.links[i], rows_rh, heads, caps, _STAY)
                rows_rh = rows_rh + self._node_s[node]
                rows_rh += closed_hr.T
            self._states[key] = [rows_rh[: len(grid)], rows_rh[len(grid) :]]
        return self._states[key]

    def _pair(
        self,
        block: Block,
        head: range,
        tail: range,
        cap: int,
        moves: _Moves,
        below_s: float = math.inf,
    ) -> _Pair:
        """Return the best split of a block between two widths with ``cap`` GPUs.

        Infinite if it takes ``below_s`` or longer. Given several widths, each branch
        may take its best ones, which gives a lower bound for all their pairs.
        """
        both = [self._lanes(chain, head, tail, moves) for chain in block.branches]
        turn_lanes, lanes = [one for one, _ in both], [other for _, other in both]
        turns_s = [lane.times_s[-1] for lane in turn_lanes]
        lanes_s = [lane.times_s[-1] for lane in lanes]
        bounds = sorted(
            (max(sum(turns_s[b] for b in home), *(lanes_s[b] for b in away), 0.0), i)
            for i, (home, away) in enumerate(self._splits(block))
        )
        every, best = self._splits(block), _Pair(math.inf, [], [], [])
        for bound_s, i in bounds:
            if bound_s >= below_s:
                break
            home, away = every[i]
            used = [in_turns([turn_lanes[b] for b in home]), *(lanes[b] for b in away)]
            if (found := shared(used, cap, below_s)) is not None:
                below_s = found[0]
                best = _Pair(below_s, home, away, found[1])
        return best

    def _block_full(self, block: Block, moves: _Moves) -> tuple[Ints, Floats]:
        """Return times by capacity and both widths, for a block within a branch."""
        key = (id(block), moves)
        if key not in self._full:
            grid, n = self._block_grid(block), self._count
            curves: list[list[tuple[Ints, Floats]]] = [[], []]
            for kind, found in zip((moves, _MOVE), curves, strict=True):
                for chain in block.branches:
                    caps = self._grid(chain)
                    times = self._chain(
                        chain,
                        np.tile(np.arange(n), len(caps)),
                        np.repeat(caps, n),
                        kind,
                    )
                    found.append((caps, times.reshape(len(caps), n * n)))
            turns, beside = curves
            min_pc = np.full((len(grid), n * n), np.inf)
            for home, away in self._splits(block):
                lanes = [sum_of([turns[b] for b in home]), *(beside[b] for b in away)]
                share_all(lanes, grid, min_pc)
            self._full[key] = grid, min_pc.reshape(len(grid), n, n)
        return self._full[key]

    # the plan behind a time

    def _place_block(
        self, block: Block, head: int, tail: int, cap: int, moves: _Moves, first: int
    ) -> None:
        pair = self._pair(block, _only(head), _only(tail), cap, moves)
        home, away, gpus = pair.home, pair.away, pair.gpus
        if not home:
            raise AssertionError("a block on the path has a plan")
        for b in home:
            self._place(block.branches[b], head, tail, gpus[0], moves, first)
        first += gpus[0]
        for b, own in zip(away, gpus[1:], strict=True):
            self._place(block.branches[b], head, tail, own, _MOVE, first)
            self._own.add(block.branches[b].nodes[0])
            first += own

    def _place(
        self, chain: Chain, head: int, tail: int, cap: int, moves: _Moves, first: int
    ) -> None:
        kept: list[Floats] = []
        caps = np.array([cap])
        self._chain(chain, np.array([head]), caps, moves, kept)
        for i in reversed(range(len(chain.links))):
            link, before = chain.links[i], head
            if i > 0:
                cost_h = self._into(link, tail, caps, moves.of(chain, i)).reshape(-1)
                before = int((kept[i - 1][0] + cost_h).argmin())
                self._node_at[chain.nodes[i - 1]] = before
                self._first[chain.nodes[i - 1]] = first
            if isinstance(link, Block):
                self._place_block(link, before, tail, cap, moves.of(chain, i), first)
            tail = before


def _only(width: int) -> range:
    return range(width, width + 1)


def _group(width: int, count: int) -> range:
    """Return the adjacent widths that are bounded together with this one."""
    start = width - width % _GROUP
    return range(start, min(start + _GROUP, count))


def _is_one_layer(chain: Chain) -> bool:
    """Return whether a branch is one layer between two edges."""
    return len(chain.nodes) == 1 and all(isinstance(x, Edge) for x in chain.links)
