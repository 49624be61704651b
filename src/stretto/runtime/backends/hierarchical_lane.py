"""Execute a lane's collectives in two levels: within each host, and across hosts.

# Note [Two levels]
With L ranks on each of H hosts, an all-reduce of n bytes is a reduce-scatter within
each host, through shared memory, an all-reduce of each rank's n/L bytes with the ranks
of the same place on the other hosts, and an all-gather within each host. The links
between hosts carry 2 (H - 1) / H * n bytes per host and direction, and L connections
share them. A ring over all H * L ranks carries 2 (HL - 1) / (HL) * n over one.

Messages are cut into pieces: while one is on the network, the next is reduced within
the host. All ranks make the calls of each level in the same order.

# Note [The same bits on every rank]
Each element is combined within a host by one rank, in rank order, and across hosts by
Gloo, which gives the same bits to its ranks. The bits differ from those of a ring over
all ranks, as those of two rings of different length do.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.runtime.backends.base import LaneFailure
from stretto.runtime.backends.host_work import HostThreads
from stretto.runtime.backends.local_collectives import (
    combiner,
    op_name,
    require_filled,
    rows_of_each,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.runtime.backends.host_work import HostWork
    from stretto.runtime.backends.local_collectives import Array, Combine, LocalLane

NAME = "hierarchical"

PIECE_BYTES = 2**20
"""A message is cut into pieces of this size."""


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Which ranks are on which host."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host; all have equally many."""

    rank: int
    """This process's rank."""

    @property
    def per_host(self) -> int:
        """Ranks on each host."""
        return len(self.hosts[0])

    @property
    def size(self) -> int:
        """All ranks."""
        return len(self.hosts) * self.per_host

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.position_of(self.rank)[0]

    @property
    def place(self) -> int:
        """The index of this rank on its host."""
        return self.position_of(self.rank)[1]

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of this place, one of each host."""
        return tuple(ranks[self.place] for ranks in self.hosts)

    def position_of(self, rank: int) -> tuple[int, int]:
        """Return the indices of a rank's host and of its place there."""
        for i, ranks in enumerate(self.hosts):
            if rank in ranks:
                return i, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no host")

    def by_place(self) -> list[int]:
        """Return all ranks in the order of places, and at each place of hosts."""
        return [ranks[place] for place in range(self.per_host) for ranks in self.hosts]

    def by_host(self) -> list[int]:
        """Return all ranks in the order of hosts, and on each host of places."""
        return [rank for ranks in self.hosts for rank in ranks]


@final
class HierarchicalLane:
    """One lane: one within the host, one across hosts, and the threads that use both.

    Its collectives run one after another, in launch order.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        local: LocalLane,
        across: Any,
        abort: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            number: The lane's number, for messages.
            layout: The ranks of each host.
            local: The lane to the other ranks of this host.
            across: The lane to the ranks of this place on other hosts.
            abort: Ends the connections of all lanes, so that a failure reaches the
                ranks to which this one is not connected.
        """
        self._number = number
        self._layout = layout
        self._levels: _Levels | _Ring = _Levels(layout, local, across)
        self._abort = abort
        self._process = os.getpid()
        self._threads: HostThreads | None = HostThreads(
            f"stretto-lane{number}", local.close
        )
        self._ring: HierarchicalLane | None = None

    @property
    def has_ring(self) -> bool:
        """Whether `using` knows rings."""
        return self._ring is not None

    def add_ring(self, flat: Any) -> None:
        """Let `using` return rings; ``flat`` is a lane to all ranks.

        They run on this lane's thread, in the order of all its calls.
        """
        self._ring = copy.copy(self)
        self._ring._levels = _Ring(flat)  # noqa: SLF001

    def using(self, algorithm: str) -> HierarchicalLane:
        """Return this lane with ``"hierarchical"`` or, after `add_ring`, ``"ring"``."""
        if algorithm == NAME:
            return self
        assert algorithm == "ring"  # noqa: S101
        assert self._ring is not None  # noqa: S101
        return self._ring

    def rank(self) -> int:
        """Return this process's rank in the lane."""
        return self._layout.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._layout.size

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> HostWork:
        """Reduce a tensor over all ranks, in place, to the same bits on each.

        Raises:
            RuntimeError: its type is not supported, or not with this operation.
        """
        (tensor,) = tensors
        op = op_name(opts)
        if tensor.layout is torch.sparse_coo:
            return self._start(self._levels.allreduce_sparse, [tensor], opts)
        if tensor.is_complex() and op not in ("SUM", "AVG"):
            raise RuntimeError(f"the {NAME} backend does not support {op} of complex")
        combiner(tensor.dtype, op, 1)  # raises if it does not support the type
        return self._start(partial(self._levels.allreduce, op), [tensor], opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> HostWork:
        """Give every rank the values of ``opts.rootRank``'s tensor."""
        root = 0 if opts is None else int(opts.rootRank)
        return self._start(partial(self._levels.broadcast, root), tensors)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> HostWork:
        """Fill ``output`` with every rank's tensor, in rank order.

        Raises:
            RuntimeError: ``output`` has another number of elements.
        """
        del opts
        require_filled(output, tensor, self._layout.size)
        return self._start(self._levels.gather, [output, tensor])

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> HostWork:
        """Send each rank its rows of ``tensor``; no splits mean equal parts.

        Raises:
            RuntimeError: the rows can't be split so.
        """
        del opts
        received = rows_of_each(output, output_splits, self._layout.size)
        sent = rows_of_each(tensor, input_splits, self._layout.size)
        if output_splits or input_splits:
            exchange = partial(self._levels.exchange_unequal, received, sent)
            return self._start(exchange, [output, tensor])
        return self._start(self._levels.exchange, [output, tensor])

    def barrier(self, opts: Any = None) -> HostWork:
        """Wait until every rank has made this call."""
        del opts
        return self._start(self._levels.barrier, [])

    def close(self) -> None:
        """End the lane after its collectives; what it uses is freed then."""
        threads, self._threads = self._threads, None
        if self._ring is not None:
            self._ring._threads = None  # noqa: SLF001
        if threads is not None and os.getpid() == self._process:
            threads.close()

    def _start(
        self, execute: Callable[..., None], tensors: list[torch.Tensor], *more: Any
    ) -> HostWork:
        if self._threads is None or os.getpid() != self._process:
            raise LaneFailure(f"lane {self._number} is closed")
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise RuntimeError(
                    f"the {NAME} backend sends tensors on the CPU, not on "
                    f"{tensor.device}"
                )
        run = partial(_guarded, self._abort, partial(execute, *tensors, *more))
        return self._threads.start(run, tensors[:1])


def _guarded(abort: Callable[[], None], execute: Callable[[], None]) -> None:
    """Execute a collective; end all connections if it fails."""
    try:
        execute()
    except BaseException:
        abort()
        raise


@final
class _Levels:
    """The collectives themselves; they run on a lane's thread."""

    def __init__(self, layout: Layout, local: LocalLane, across: Any) -> None:
        self._layout = layout
        self._local = local
        self._across = across
        self._by_place = torch.tensor(layout.by_place(), device="cpu")
        self._by_host = torch.tensor(layout.by_host(), device="cpu")

    def allreduce(self, op: str, tensor: torch.Tensor, opts: Any) -> None:
        del opts
        values = tensor.detach()
        is_plain = values.is_contiguous() and not (values.is_conj() or values.is_neg())
        if not is_plain:
            values = values.resolve_conj().resolve_neg().contiguous()
        flat = torch.view_as_real(values) if values.is_complex() else values
        self._reduce_flat(flat.view(-1), "SUM" if op == "AVG" else op)
        if op == "AVG":
            values.div_(self._layout.size)
        if not is_plain:
            tensor.detach().copy_(values)

    def _reduce_flat(self, flat: torch.Tensor, op: str) -> None:
        """Reduce elements of one dimension, in place. See Note [Two levels]."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        count = self._layout.per_host
        longest = max(1, PIECE_BYTES // flat.element_size() // count) * count
        whole = len(flat) // count * count
        pieces = list(flat[:whole].split(longest)) if whole else []
        rest = flat[whole:]
        padded = flat.new_zeros(count)
        if len(rest):
            padded[: len(rest)] = rest
            pieces.append(padded)
        combine = combiner(flat.dtype, op, count)
        started = []
        for piece in pieces:
            share = self._reduced_share(piece, combine)
            started.append((piece, share, self._across.allreduce([share], options)))
        for piece, share, work in started:
            work.wait()
            self._local._allgather_base(piece, share).wait()  # noqa: SLF001
        rest.copy_(padded[: len(rest)])

    def _reduced_share(self, piece: torch.Tensor, combine: Combine) -> torch.Tensor:
        """Combine this rank's share of a piece over the host's ranks, in place."""
        count = self._layout.per_host
        received = torch.empty_like(piece)
        self._local.alltoall_base(received, piece, [], []).wait()
        share = piece.view(count, -1)[self._layout.place]
        combine(_bytes(share), [_bytes(part) for part in received.view(count, -1)])
        return share

    def allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> None:
        self._local.allreduce([tensor], opts).wait()
        self._across.allreduce([tensor], opts or dist.AllreduceOptions()).wait()

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        host, place = self._layout.position_of(root)
        options: Any = dist.BroadcastOptions()
        options.rootTensor = 0
        if place == self._layout.place:
            options.rootRank = host
            self._across.broadcast([tensor], options).wait()
        options.rootRank = place
        self._local.broadcast([tensor], options).wait()

    def gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # Each rank sends its own values over the network, and then those of the ranks
        # of its place within the host.
        hosts, size = len(self._layout.hosts), self._layout.size
        mine = tensor.detach().contiguous().view(-1)
        of_place = mine.new_empty(hosts * len(mine))
        self._across._allgather_base(of_place, mine).wait()  # noqa: SLF001
        everything = mine.new_empty(size, len(mine))
        self._local._allgather_base(everything.view(-1), of_place).wait()  # noqa: SLF001
        ordered = torch.empty_like(everything)
        ordered[self._by_place] = everything
        output.detach().copy_(ordered.view(output.shape))

    def exchange(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # First to the rank of this host whose place is the target's, then across.
        hosts, count = len(self._layout.hosts), self._layout.per_host
        rows = tensor.detach().contiguous().view(self._layout.size, -1)
        sent = rows[self._by_place]
        passed = torch.empty_like(sent)
        self._local.alltoall_base(passed, sent, [], []).wait()
        # By source on this host and target host; across hosts it goes the other way.
        turned = passed.view(count, hosts, -1).transpose(0, 1).contiguous()
        arrived = torch.empty_like(turned)
        self._across.alltoall_base(
            arrived, turned, [], [], dist.AllToAllOptions()
        ).wait()
        ordered = torch.empty_like(sent)
        ordered[self._by_host] = arrived.view(self._layout.size, -1)
        output.detach().copy_(ordered.view(output.shape))

    def exchange_unequal(
        self,
        received: list[int],
        sent: list[int],
        output: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        """Exchange parts of different sizes, each padded to the longest of all."""
        size = self._layout.size
        table = torch.empty(size * size, dtype=torch.int64, device="cpu")
        self.gather(table, torch.tensor(sent, dtype=torch.int64, device="cpu"))
        table = table.view(size, size)
        wanted = table[:, self._layout.rank].tolist()
        if wanted != received:
            raise RuntimeError(
                f"rank {self._layout.rank} expects {received} rows from the ranks, "
                f"which send {wanted}"
            )
        longest = int(table.max())
        shape = tensor.shape[1:]
        padded = tensor.new_zeros((size, longest, *shape))
        for part, rows in zip(padded, tensor.detach().split(sent), strict=True):
            part[: len(rows)] = rows
        found = torch.empty_like(padded)
        self.exchange(found, padded)
        parts = [part[:n] for part, n in zip(found, received, strict=True)]
        output.detach().copy_(torch.cat(parts))

    def barrier(self) -> None:
        self._local.barrier().wait()
        self._across.barrier(opts=dist.BarrierOptions()).wait()
        self._local.barrier().wait()


@final
class _Ring:
    """The same collectives on one lane over all ranks."""

    def __init__(self, flat: Any) -> None:
        self._flat = flat

    def allreduce(self, op: str, tensor: torch.Tensor, opts: Any) -> None:
        del op
        self._flat.allreduce([tensor], opts or dist.AllreduceOptions()).wait()

    def allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> None:
        self.allreduce("SUM", tensor, opts)

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._flat.broadcast([tensor], options).wait()

    def gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._flat._allgather_base(output, tensor).wait()  # noqa: SLF001

    def exchange(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self.exchange_unequal([], [], output, tensor)

    def exchange_unequal(
        self,
        received: list[int],
        sent: list[int],
        output: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        options = dist.AllToAllOptions()
        self._flat.alltoall_base(output, tensor, received, sent, options).wait()

    def barrier(self) -> None:
        self._flat.barrier(opts=dist.BarrierOptions()).wait()


def _bytes(values: torch.Tensor) -> Array:
    found: Array = values.view(torch.uint8).numpy()
    return found
