"""Sequence of operations of each rank in a step of a burst plan.

Called by `stretto.sim.burst`, which gives these operations their times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from stretto.cost.burst import MAX_DIRECT, NORM_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stretto.schema.burst import BurstPlan, LayerProfile


class SampleLayouts(Protocol):
    """Provides the samples that each rank holds while a layer runs on some ranks."""

    def samples(self, ranks: tuple[int, int] | None) -> Sequence[NDArray[np.int64]]:
        """Return samples by rank; ``ranks``: first, number; ``None``: as received."""


@dataclass(frozen=True, slots=True)
class RankComputation:
    """A rank computes."""

    name: str
    kind: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """A rank provides its part of a move."""

    move: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A rank waits for its part of a move."""

    move: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A rank submits a bucket, or at the end waits for all of them."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Await:
    """A rank waits for one bucket."""

    bucket: int


Op = RankComputation | Begin | Finish | Sum | Await
Ranks = tuple[int, int] | None
"""The first rank and the number of ranks; ``None``: as the samples were received."""

_INPUT = -1
ALL = -1
"""Bucket number that means: wait for all of them."""


@dataclass(slots=True)
class RankTransfer:
    """Bytes from rank to rank."""

    name: str
    pairs: dict[tuple[int, int], float]

    @property
    def ranks(self) -> set[int]:
        return {rank for pair in self.pairs for rank in pair}


@dataclass(slots=True)
class BurstBucket:
    """A collective of some ranks."""

    name: str
    ranks: tuple[int, ...]
    size_bytes: int
    steps: int
    """Latencies of its ring."""

    startup_s: float | None = None
    """Replaces the latencies if it was measured."""

    @property
    def messages(self) -> int:
        """Messages sent and received by all ranks together."""
        count = len(self.ranks)
        return 2 * count * max(self.steps, count - 1)


@final
class Script:
    """Operations of each rank, in order."""

    def __init__(
        self,
        profile: LayerProfile,
        plan: BurstPlan,
        layouts: SampleLayouts,
        bucket_bytes: int,
    ) -> None:
        self._profile, self._layouts = profile, layouts
        self.ops: list[list[Op]] = [[] for _ in range(plan.gpus)]
        self.moves: list[RankTransfer] = []
        self.buckets: list[BurstBucket] = []
        self._at: list[Ranks] = [(e.first_gpu, e.gpus) for e in plan.layers]
        self._gpus = plan.gpus
        self._moved: dict[tuple[Ranks, Ranks], dict[tuple[int, int], int]] = {}
        number = {layer.name: i for i, layer in enumerate(profile.layers)}
        self._reads = [[number[n] for n in layer.inputs] for layer in profile.layers]
        self._readers: list[list[int]] = [[] for _ in profile.layers]
        for i, reads in enumerate(self._reads):
            for read in reads:
                self._readers[read].append(i)
        self._forward()
        self._backward(bucket_bytes)
        for rank, ops in enumerate(self.ops):
            ops.append(Sum(ALL))
            synced_bytes = sum(
                layer.parameter_bytes
                for layer, at in zip(profile.layers, self._at, strict=True)
                if at is not None and at[1] > 1 and at[0] <= rank < at[0] + at[1]
            )
            self._copy(rank, synced_bytes)
            update_s = sum(
                layer.update_s
                for layer, at in zip(profile.layers, self._at, strict=True)
                if at is not None and at[0] <= rank < at[0] + at[1]
            )
            if update_s:
                ops.append(RankComputation("update", "update", update_s))
            if profile.outside_s:
                ops.append(RankComputation("outside", "outside", profile.outside_s))

    def _forward(self) -> None:
        layers = self._profile.layers
        if self._gpus > 1:
            # First the ranks exchange how many samples each of them has.
            everyone = tuple(range(self._gpus))
            rounds = 1 if self._gpus <= MAX_DIRECT else self._gpus - 1
            host = self._profile.host
            asked_s = None if host is None else host.exchange_s
            self.buckets.append(BurstBucket("counts", everyone, 0, rounds, asked_s))
            for ops in self.ops:
                ops += [Sum(0), Await(0)]
        moves: dict[tuple[int, Ranks], int] = {}
        for i in (i for i, reads in enumerate(self._reads) if not reads):
            self._begin_once(moves, _INPUT, i, "input", self._profile.input_bytes)
        for i, layer in enumerate(layers):
            for read in self._reads[i] or [_INPUT]:
                self._finish(moves[read, self._at[i]])
            self._compute(i, backward=False)
            for reader in self._readers[i]:
                name = f"{layer.name} to {layers[reader].name}"
                self._begin_once(moves, i, reader, name, layer.activation_bytes)
        self._finish(
            self._begin("output", self._at[-1], None, layers[-1].activation_bytes)
        )

    def _begin_once(
        self,
        moves: dict[tuple[int, Ranks], int],
        source: int,
        reader: int,
        name: str,
        each_bytes: int,
    ) -> None:
        """Begin one move for all readers on the same ranks."""
        at = None if source == _INPUT else self._at[source]
        key = (source, self._at[reader])
        if key not in moves:
            moves[key] = self._begin(name, at, self._at[reader], each_bytes)

    def _backward(self, bucket_bytes: int) -> None:
        layers = self._profile.layers
        moves: dict[tuple[int, Ranks], int] = {}
        last = layers[-1].activation_bytes
        self._finish(self._begin("output's gradient", None, self._at[-1], last))
        buckets = self._bucketed(bucket_bytes)
        for i in reversed(range(len(layers))):
            for at in dict.fromkeys(self._at[r] for r in reversed(self._readers[i])):
                self._finish(moves[i, at])
            self._compute(i, backward=True)
            first, width = self._at[i] or (0, 1)
            for rank in range(first, first + width) if width > 1 else ():
                self._copy(rank, layers[i].parameter_bytes)
            if i in buckets:
                for rank in self.buckets[buckets[i]].ranks:
                    self.ops[rank].append(Sum(buckets[i]))
            for read in reversed(self._reads[i]):
                at = self._at[i]
                # The gradients of all readers on the same ranks are returned together.
                first = min(r for r in self._readers[read] if self._at[r] == at)
                if i == first:
                    name = f"gradient of {layers[read].name}"
                    size = layers[read].activation_bytes
                    moves[read, at] = self._begin(name, at, self._at[read], size)

    def _compute(self, i: int, *, backward: bool) -> None:
        layer = self._profile.layers[i]
        for rank, rows in enumerate(self._layouts.samples(self._at[i])):
            if rank < self._gpus and len(rows):
                # A rank with fewer samples than profiled takes the least profiled time.
                samples = max(len(rows), layer.times[0].samples)
                seconds = layer.time_of(samples)[backward]
                kind = "backward" if backward else "forward"
                self.ops[rank].append(RankComputation(layer.name, kind, seconds))
        self._exchange_norms(i, backward=backward)

    def _exchange_norms(self, i: int, *, backward: bool) -> None:
        """Add batch norms' exchange after the computation, though it runs within it."""
        layer, at = self._profile.layers[i], self._at[i]
        if at is None or at[1] == 1 or not layer.norms:
            return
        ranks = tuple(range(at[0], at[0] + at[1]))
        rounds = 2 if backward else NORM_STEPS - 2
        steps = layer.norms * rounds * (len(ranks) - 1)
        number = len(self.buckets)
        self.buckets.append(BurstBucket(f"norms of {layer.name}", ranks, 0, steps))
        for rank in ranks:
            self.ops[rank] += [Sum(number), Await(number)]

    def _begin(
        self,
        name: str,
        source: Ranks,
        target: Ranks,
        each_bytes: int,
    ) -> int:
        """Add a move, begun by every participating rank; return its number."""
        pairs = {
            pair: float(count * each_bytes)
            for pair, count in self._samples_moved(source, target).items()
        }
        self.moves.append(RankTransfer(name, pairs))
        for rank in sorted(self.moves[-1].ranks):
            self._call(rank, name, pairs)
            self.ops[rank].append(Begin(len(self.moves) - 1))
        return len(self.moves) - 1

    def _samples_moved(
        self, source: Ranks, target: Ranks
    ) -> dict[tuple[int, int], int]:
        """Return how many samples move from rank to rank between two layouts."""
        key = (source, target)
        if key not in self._moved:
            before = self._layouts.samples(source)
            owner = np.zeros(sum(map(len, before)), np.int64)
            for rank, rows in enumerate(before):
                owner[rows] = rank
            self._moved[key] = {
                (int(peers[i]), rank): int(counts[i])
                for rank, rows in enumerate(self._layouts.samples(target))
                for peers, first, counts in [
                    np.unique(owner[rows], return_index=True, return_counts=True)
                ]
                for i in np.argsort(first)  # peers in the order of the rank's samples
                if peers[i] != rank
            }
        return self._moved[key]

    def _call(self, rank: int, name: str, pairs: dict[tuple[int, int], float]) -> None:
        """Add the time that a rank's thread needs to begin a move."""
        host = self._profile.host
        if host is not None:
            sizes = [size for pair, size in pairs.items() if rank in pair]
            seconds = sum(
                host.message_s + host.message_s_per_byte * size for size in sizes
            )
            self.ops[rank].append(RankComputation(name, "move", seconds))

    def _copy(self, rank: int, size_bytes: int) -> None:
        """Add the copy of gradients into a bucket, or out of it."""
        host = self._profile.host
        if host is not None and size_bytes:
            seconds = host.copy_s_per_byte * size_bytes
            self.ops[rank].append(RankComputation("gradients", "copy", seconds))

    def _finish(self, move: int) -> None:
        for rank in sorted({to for _, to in self.moves[move].pairs}):
            self.ops[rank].append(Finish(move))

    def _bucketed(self, bucket_bytes: int) -> dict[int, int]:
        """Return buckets by the layer after whose backward each is full.

        A bucket is full at this many bytes or more, as in the executor. There a layer's
        parameters may be in two buckets, here they are in one.
        """
        closed: dict[int, int] = {}
        open_: dict[Ranks, tuple[int, int]] = {}

        def close(at: Ranks) -> None:
            size, layer = open_.pop(at)
            ranks = tuple(range(at[0], at[0] + at[1])) if at else ()
            name = f"gradients to {self._profile.layers[layer].name}"
            closed[layer] = len(self.buckets)
            self.buckets.append(BurstBucket(name, ranks, size, 2 * (len(ranks) - 1)))

        for i in reversed(range(len(self._profile.layers))):
            at, size = self._at[i], self._profile.layers[i].parameter_bytes
            if at is None or at[1] == 1 or not size:
                continue
            open_[at] = (open_.get(at, (0, i))[0] + size, i)
            if open_[at][0] >= bucket_bytes:
                close(at)
        for at in list(open_):
            close(at)
        return closed
