"""The connections of a burst-parallel model: among all ranks, and among a layer's.

All of them are lanes of the runtime, opened when a plan is applied, in one order on
every rank. All ranks share one lane for moving samples, and one on the CPU for the
numbers that start every forward. The ranks of each width share lanes for gradients, and
one for the statistics of batch norms, which must not queue behind gradients.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.distributed_c10d import PrefixStore

from stretto.burst.refusals import Refusals
from stretto.cost.burst import MAX_DIRECT
from stretto.errors import CommTimeout
from stretto.runtime import backends
from stretto.runtime.failure import FailureReporter
from stretto.runtime.lanes import LanePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stretto.runtime.agreement import Ranks

RankRange = tuple[int, int]
"""Consecutive ranks: the first, and how many."""


def is_among(width: RankRange, rank: int) -> bool:
    """Return whether a rank is one of these ranks."""
    first, size = width
    return first <= rank < first + size


_MOVES, _NUMBERS = 0, 1


@final
class GroupLanes:
    """The lanes among the ranks of one width; this rank is one of them."""

    def __init__(self, pool: LanePool, ranks: Ranks, *, lanes: int) -> None:
        self.size = ranks.size
        self.rank = ranks.rank
        self.lanes: tuple[Any, ...] = tuple(pool.lane(n) for n in range(lanes))
        self.norms = pool.lane(lanes)

    def release(self) -> None:
        """Drop the lanes; nothing may be sent afterward."""
        self.lanes = ()
        self.norms = None


@final
class RankGroups:
    """All connections of one model on this rank."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        serial: int,
        backend: str,
        device: torch.device,
        lanes: int,
    ) -> None:
        self.ranks = ranks
        self._serial = serial
        self._backend = backend
        self._device = device
        self._lanes = lanes
        self._pools: list[LanePool] = []
        self._groups: dict[RankRange, GroupLanes] = {}
        self.failures = FailureReporter(
            ranks, self._abort, key=lambda: f"burst/{serial}"
        )
        self.elsewhere: Callable[[], str] = str
        """Reports errors of other ranks in this one."""
        weak = weakref.ref(self)
        self.refusals = Refusals(ranks, serial, lambda text: _stop(weak, text))
        self._moves: Any = None
        self._numbers: Any = None
        self._direct: Any = torch.distributed.AllToAllOptions()
        if ranks.size > 1:
            with self.guard("opening connections"):
                self._moves = self._pool(ranks, backend, device).lane(_MOVES)
                on_cpu = self._pool(ranks, backends.ON_HOST, torch.device("cpu"))
                self._numbers = on_cpu.lane(_NUMBERS)

    def _pool(self, ranks: Ranks, backend: str, device: torch.device) -> LanePool:
        pool = LanePool(ranks, serial=self._serial, backend=backend, device=device)
        self._pools.append(pool)
        return pool

    def open(self, widths: Iterable[RankRange]) -> None:
        """Open the connections for the widths; every rank must pass the same.

        Raises:
            CommTimeout: a rank did not connect.
        """
        for first, size in sorted(set(widths)):
            inside = is_among((first, size), self.ranks.rank)
            if size == 1 or not inside or (first, size) in self._groups:
                continue
            ranks = replace(
                self.ranks,
                rank=self.ranks.rank - first,
                size=size,
                names=self.ranks.names[first : first + size],
                store=PrefixStore(f"burst/{first}/{size}", self.ranks.store),
            )
            with self.guard(f"opening connections for {ranks.name_all(range(size))}"):
                pool = self._pool(ranks, self._backend, self._device)
                self._groups[first, size] = GroupLanes(pool, ranks, lanes=self._lanes)

    def group(self, width: RankRange) -> GroupLanes | None:
        """Return the lanes of a width; ``None`` if it has only one rank."""
        return self._groups.get(width)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers that each rank passed, by rank; all pass equally many.

        If there are few ranks, each sends directly to every other, see `MAX_DIRECT`.
        """
        if self._numbers is None:
            return [numbers]
        size = self.ranks.size
        found = torch.empty((size, len(numbers)), dtype=torch.int64, device="cpu")
        if size <= MAX_DIRECT:
            copies = [numbers] * size
            mine = torch.tensor(copies, dtype=torch.int64, device="cpu")
            work = self._numbers.alltoall_base(found, mine, [], [], self._direct)
        else:
            mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            work = self._numbers._allgather_base(found, mine)  # noqa: SLF001
        work.wait()
        rows: list[list[int]] = found.tolist()
        return rows

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Give every rank ``root``'s values of a tensor, see `in_memory`."""
        if self._moves is not None and tensor.numel():
            # As bytes: backends do not support every type.
            whole = tensor.detach().view(-1).view(torch.uint8)
            self._moves.broadcast([whole], _broadcast_options(root)).wait()

    def reduce_number(self, value: torch.Tensor, operation: Any) -> None:
        """All-reduce a tensor over all ranks in place."""
        if self._moves is not None:
            self._moves.allreduce([value], _reduce_options(operation)).wait()

    def post(
        self,
        sends: list[tuple[int, torch.Tensor]],
        receives: list[tuple[int, torch.Tensor]],
        tag: int,
    ) -> tuple[list[Any], list[Any]]:
        """Start sending and receiving; return the works to wait for.

        ``tag`` pairs a peer's send with this rank's receive.
        """
        lane = self._moves
        if not backends.get(self._backend).pairs_by_order:
            got = [lane.recv([rows], peer, tag) for peer, rows in receives]
            return [lane.send([rows], peer, tag) for peer, rows in sends], got
        # The group is awaited as one.
        if not sends and not receives:
            return [], []
        lane._start_coalescing()  # noqa: SLF001
        for peer, rows in receives:
            lane.recv([rows], peer, tag)
        for peer, rows in sends:
            lane.send([rows], peer, tag)
        whole = lane._end_coalescing()  # noqa: SLF001
        return [whole] * len(sends), [whole] * len(receives)

    @contextlib.contextmanager
    def guard(self, place: str) -> Iterator[None]:
        """Turn a failure of communication into the model's one error.

        Raises:
            CommTimeout: naming the place and the lost ranks.
        """
        if self.failures.error is not None:
            raise self.failures.error
        self.refusals.withdraw()
        try:
            with self.refusals.waiting(place):
                yield
        except RuntimeError as exc:
            raise self.report(place, exc) from exc

    def report(self, place: str, cause: BaseException) -> CommTimeout:
        """Return the model's one error after a failure of communication."""
        own = self.refusals.given_up()
        if own and self.failures.error is None:
            self.failures.error = CommTimeout(
                f"{self.ranks.name(self.ranks.rank)}: {place} can't finish: the "
                "other ranks no longer wait for this one, after an error of its "
                f"own: {own}"
            )
        if self.failures.error is None and (why := self.refusals.explain(place)):
            self.end(why)
        is_first = self.failures.error is None
        error = self.failures.report(place, cause)
        if is_first and (more := self.elsewhere()):
            error = self.failures.error = CommTimeout(f"{error} {more}")
        return error

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Inform the other ranks if this rank can't finish the step."""
        try:
            yield
        except Exception as exc:
            if self.failures.error is None:
                self.refusals.tell(exc, inside=True)
            raise

    def end(self, text: str) -> None:
        """Close the connections and make this every later call's error."""
        if self.failures.error is None:
            self.failures.error = CommTimeout(text)
            self._abort()

    def close(self) -> None:
        """End all connections, once their collectives are done."""
        self.refusals.close()
        for pool in self._pools:
            pool.close()
        # A Gloo backend ends with the last reference to it.
        for group in self._groups.values():
            group.release()
        self._groups.clear()
        self._moves = self._numbers = None

    def _abort(self) -> None:
        for pool in self._pools:
            pool.abort()


def _stop(rank_groups: weakref.ref[RankGroups], text: str) -> None:
    found = rank_groups()
    if found is not None:
        found.end(text)


def _broadcast_options(root: int) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _reduce_options(operation: Any) -> Any:
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = operation
    return options
