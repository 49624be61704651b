"""Execute a lane's collectives through shared memory.

# Note [How tensors move]
A rank copies its values into its slot, enters a step, and reads the others' slots; see
Note [Steps and slots] in `shared_memory`. Tensors larger than a slot take several
rounds. Two ranks, and more with small tensors, add up all slots, each for itself:
one step. Otherwise each rank adds up its share of all slots and publishes that, and all
copy the shares: two steps, as a reduce-scatter and an all-gather.

# Note [The same bits on every rank]
Every element is combined in rank order. With two ranks the result is Gloo's bit for
bit, because a sum of two is rounded once and does not depend on their order. float16
and bfloat16 are combined in float32 and rounded once, for any number of ranks.

# Note [One processor per lane]
Copies and sums run on the lane's own thread alone, as Gloo's do: NumPy never uses
several threads for them, and torch does not for fewer than 32,768 elements. OpenMP's
threads would take the processors on which backward runs. Both release Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy
import torch
import torch.distributed as dist

from stretto.runtime.backends.base import LaneFailure
from stretto.runtime.backends.host_work import HostThreads
from stretto.runtime.backends.shared_memory import (
    DESCRIPTION_BYTES,
    SLOT_BYTES,
    SharedSegment,
)
from stretto.runtime.torch_compat import sparse_coo_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stretto.runtime.backends.host_work import HostWork
    from stretto.runtime.ranks import Ranks

    Array = numpy.ndarray[Any, Any]
    Combine = Callable[[Array, Sequence[Array]], None]
    """Fills the first array with the combined others, all as bytes."""

NAME = "local"
DEVICE_TYPE = "cpu"

_ROOM = SLOT_BYTES - DESCRIPTION_BYTES
"""Bytes of a tensor in one slot."""

_DIRECT_BYTES = 64 * 1024
"""Up to this many bytes from all other ranks, each rank adds up everything."""

_TORCH_ELEMENTS = 32_768
"""Torch uses one thread up to this many elements (its grain size)."""

_WIDE = (torch.float16, torch.bfloat16)
"""Types that are combined in float32."""

_NUMPY = {
    getattr(torch, name): numpy.dtype(name)
    for name in (
        *("float32", "float64", "complex64", "complex128", "bool", "uint8"),
        *("int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    )
}
_DTYPE_NUMBERS = {dtype: i for i, dtype in enumerate((*_NUMPY, *_WIDE))}

_OP_NAMES = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
_OPS = {
    name: (getattr(dist.ReduceOp, name), ufunc)
    for name, ufunc in zip(
        _OP_NAMES,
        (
            *(numpy.add, numpy.add, numpy.minimum, numpy.maximum, numpy.multiply),
            *(numpy.bitwise_and, numpy.bitwise_or, numpy.bitwise_xor),
        ),
        strict=True,
    )
}
_ON_FLOATS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
_ON_COMPLEX = ("SUM", "AVG", "PRODUCT")

_WIDE_STEPS: dict[str, Any] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
}

_KINDS = ("all-reduce", "broadcast", "all-gather", "all-to-all", "barrier")
_DESCRIPTION = struct.Struct("<5q")


def op_name(opts: Any) -> str:
    """Return the name of the reduction in a collective's options.

    Raises:
        RuntimeError: it is not supported.
    """
    if opts is None:
        return "SUM"
    wanted = opts.reduceOp
    for name, (known, _) in _OPS.items():
        if wanted == known:
            return name
    raise RuntimeError(f"the local backend does not support {wanted}")


def combiner(dtype: torch.dtype, op: str, ranks: int) -> Combine:
    """Return what combines arrays of one type, in rank order.

    Raises:
        RuntimeError: the backend does not support the type, or not with ``op``.
    """
    allowed: Sequence[str] = _OP_NAMES
    if dtype.is_complex:
        allowed = _ON_COMPLEX
    elif dtype.is_floating_point:
        allowed = _ON_FLOATS
    elif op == "AVG":
        allowed = ()
    if dtype not in _DTYPE_NUMBERS or op not in allowed:
        raise RuntimeError(
            f"the local backend does not support an all-reduce ({op}) of {dtype}"
        )
    if dtype in _WIDE:
        return partial(_combine_wide, dtype, op, ranks)
    return partial(_combine, _NUMPY[dtype], _OPS[op][1], ranks if op == "AVG" else 1)


def _combine(
    dtype: Any, ufunc: Any, divisor: int, out: Array, parts: Sequence[Array]
) -> None:
    values = out.view(dtype)
    first, *others = (part.view(dtype) for part in parts)
    with numpy.errstate(all="ignore"):  # an overflow is infinite, as elsewhere
        if not others:
            numpy.copyto(values, first)
        for other in others:
            ufunc(first, other, out=values)
            first = values
        if divisor > 1:
            numpy.divide(values, divisor, out=values)


def _combine_wide(
    dtype: torch.dtype, op: str, ranks: int, out: Array, parts: Sequence[Array]
) -> None:
    step = _WIDE_STEPS[op]
    values = torch.from_numpy(out).view(dtype).split(_TORCH_ELEMENTS)
    pieces = (torch.from_numpy(p).view(dtype).split(_TORCH_ELEMENTS) for p in parts)
    for target, first, *others in zip(values, *pieces, strict=True):
        total = first.float()
        for other in others:
            step(total, other.float(), out=total)
        if op == "AVG":
            total.div_(ranks)
        target.copy_(total)


@contextlib.contextmanager
def _as_bytes(tensor: torch.Tensor, *, changes: bool) -> Iterator[Array]:
    """Yield a tensor's memory as bytes; with ``changes`` they may be written."""
    values = tensor.detach()
    plain = values.is_contiguous() and not (values.is_conj() or values.is_neg())
    if not plain:
        values = values.resolve_conj().resolve_neg().contiguous()
    flat = torch.view_as_real(values) if values.is_complex() else values
    yield flat.reshape(-1).view(torch.uint8).numpy()
    if changes and not plain:
        tensor.detach().copy_(values)


@final
class LocalLane:
    """One lane: the memory, and the threads that execute its collectives."""

    def __init__(self, number: int, segment: SharedSegment, ranks: Ranks) -> None:
        self._number = number
        self._segment = segment
        self._rank, self._size = ranks.rank, ranks.size
        self._name_all = ranks.name_all
        self._process = os.getpid()
        # The threads hold the segment, not the lane: they end with its last user.
        self._threads: HostThreads | None = HostThreads(
            f"stretto-lane{number}", segment.leave
        )

    def rank(self) -> int:
        """Return this process's rank in the lane."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    # Collectives. See `base.Lane`.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> HostWork:
        """Reduce a tensor over all ranks, in place, to the same bits on each.

        Raises:
            RuntimeError: its type is not supported, or not with this operation.
        """
        (tensor,) = tensors
        op = op_name(opts)
        combine = combiner(tensor.dtype, op, self._size)
        if tensor.layout is torch.sparse_coo:
            if op != "SUM":
                raise RuntimeError(
                    f"the local backend does not support {op} of sparse tensors"
                )
            return self._start(self._allreduce_sparse, [tensor])
        return self._start(
            partial(self._allreduce, combine=combine, op=_OP_NAMES.index(op)), [tensor]
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> HostWork:
        """Give every rank the values of ``opts.rootRank``'s tensor."""
        (tensor,) = tensors
        root = 0 if opts is None else int(opts.rootRank)
        return self._start(partial(self._broadcast, root=root), [tensor])

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> HostWork:
        """Fill ``output`` with every rank's tensor, in rank order.

        Raises:
            RuntimeError: ``output`` has another number of elements.
        """
        del opts
        require_filled(output, tensor, self._size)
        return self._start(self._gather, [output, tensor])

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> HostWork:
        """Fill a list of tensors, one per rank; all have the same size."""
        del opts
        (parts,), (tensor,) = outputs, tensors
        return self._start(self._gather_list, [tensor, *parts], results=parts)

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
        received = _parts_bytes(output, output_splits, self._size)
        sent = _parts_bytes(tensor, input_splits, self._size)
        exchange = partial(self._exchange, received=received, sent=sent)
        return self._start(exchange, [output, tensor])

    def barrier(self, opts: Any = None) -> HostWork:
        """Wait until every rank has made this call."""
        del opts
        return self._start(self._barrier, [])

    # Ending.

    def abort(self) -> None:
        """Make every collective of this lane fail, here and on the other ranks."""
        name = self._name_all([self._rank])
        self._segment.fail(f"{name} aborted {self.label}")

    def close(self) -> None:
        """End the lane after its collectives; its memory is freed then."""
        threads, self._threads = self._threads, None
        if threads is not None and os.getpid() == self._process:
            threads.close()

    @property
    def label(self) -> str:
        """The lane's name in messages."""
        return f"lane {self._number} on shared memory"

    # Execution, on the lane's thread.

    def _start(
        self,
        execute: Callable[..., None],
        tensors: list[torch.Tensor],
        results: list[torch.Tensor] | None = None,
    ) -> HostWork:
        if self._threads is None or os.getpid() != self._process:
            raise LaneFailure(f"{self.label} is closed")
        for tensor in tensors:
            if tensor.device.type != DEVICE_TYPE:
                raise RuntimeError(
                    "the local backend sends tensors on the CPU, not on "
                    f"{tensor.device}"
                )
        run = partial(_guarded, self._segment, partial(execute, *tensors))
        return self._threads.start(run, tensors[:1] if results is None else results)

    def _describe(
        self, slot: Array, kind: str, size_bytes: int, *more: int
    ) -> tuple[int, ...]:
        row = (_KINDS.index(kind), size_bytes, *more, *[0] * (3 - len(more)))
        _DESCRIPTION.pack_into(slot.data, 0, *row)
        return row

    def _require_same(self, slot: Array, mine: tuple[int, ...], rank: int) -> None:
        """Require that a rank makes the same call.

        Raises:
            RankDisagreement: with both calls.
        """
        theirs = _DESCRIPTION.unpack_from(slot.data)
        if theirs != mine:
            raise self._segment.disagree(
                f"ranks make different calls on {self.label}: "
                f"{self._name_all([self._rank])} {_described(mine)}, "
                f"{self._name_all([rank])} {_described(theirs)}"
            )

    def _allreduce(self, tensor: torch.Tensor, *, combine: Combine, op: int) -> None:
        with _as_bytes(tensor, changes=True) as values:
            width = tensor.element_size()
            row = (len(values), _DTYPE_NUMBERS[tensor.dtype], op)
            direct = self._size <= 2 or len(values) * (self._size - 1) <= _DIRECT_BYTES
            reduce = self._reduce_all if direct else self._reduce_shares
            room = _ROOM // width * width
            for start in range(0, max(1, len(values)), room):
                reduce(values[start : start + room], width, row, combine)

    def _publish(
        self, values: Array, kind: str, row: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Write values into this rank's slot and enter the step."""
        slot = self._segment.begin()
        mine = self._describe(slot, kind, *row)
        numpy.copyto(slot[DESCRIPTION_BYTES : DESCRIPTION_BYTES + len(values)], values)
        self._segment.enter()
        return mine

    def _slots(self, size: int, mine: tuple[int, ...]) -> list[Array]:
        """Return the content of every rank's slot, by rank, once it is there."""
        found: dict[int, Array] = {}
        for rank in (*self._segment.others, self._rank):
            slot = self._segment.read(rank)
            self._require_same(slot, mine, rank)
            found[rank] = slot[DESCRIPTION_BYTES : DESCRIPTION_BYTES + size]
        return [found[rank] for rank in range(self._size)]

    def _reduce_all(
        self, values: Array, _width: int, row: tuple[int, ...], combine: Combine
    ) -> None:
        mine = self._publish(values, "all-reduce", row)
        combine(values, self._slots(len(values), mine))

    def _reduce_shares(
        self, values: Array, width: int, row: tuple[int, ...], combine: Combine
    ) -> None:
        size = self._size
        mine = self._publish(values, "all-reduce", row)
        slots = self._slots(len(values), mine)
        elements = len(values) // width
        cuts = [elements * i // size * width for i in range(size + 1)]
        low, high = cuts[self._rank], cuts[self._rank + 1]
        combine(values[low:high], [slot[low:high] for slot in slots])
        mine = self._publish(values[low:high], "all-reduce", row)
        for rank in self._segment.others:
            slot = self._segment.read(rank)
            part = values[cuts[rank] : cuts[rank + 1]]
            numpy.copyto(part, slot[DESCRIPTION_BYTES : DESCRIPTION_BYTES + len(part)])

    def _allreduce_sparse(self, tensor: torch.Tensor) -> None:
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        counts = torch.empty(self._size, dtype=torch.int64, device="cpu")
        self._gather(counts, torch.tensor([values.shape[0]], device="cpu"))
        longest = int(counts.max())
        all_indices = self._gather_padded(indices.t(), longest)
        all_values = self._gather_padded(values, longest)
        parts = [
            sparse_coo_tensor(rows[:count].t(), numbers[:count], mine.shape)
            for rows, numbers, count in zip(
                all_indices, all_values, counts.tolist(), strict=True
            )
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        with torch.no_grad():  # a detached sparse tensor would be another one
            tensor.copy_(total.coalesce())

    def _gather_padded(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """Return every rank's rows, each padded to ``longest`` rows."""
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        found = rows.new_empty((self._size, *padded.shape))
        self._gather(found, padded)
        return found

    def _broadcast(self, tensor: torch.Tensor, *, root: int) -> None:
        with _as_bytes(tensor, changes=root != self._rank) as values:
            row = (len(values), 0, 0, root)
            mine = (_KINDS.index("broadcast"), *row)
            for start in range(0, max(1, len(values)), _ROOM):
                part = values[start : start + _ROOM]
                if root == self._rank:
                    self._publish(part, "broadcast", row)
                    continue
                self._segment.enter()  # what was read before is done with
                slot = self._segment.read(root)
                self._require_same(slot, mine, root)
                numpy.copyto(
                    part, slot[DESCRIPTION_BYTES : DESCRIPTION_BYTES + len(part)]
                )

    def _gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        with (
            _as_bytes(output, changes=True) as found,
            _as_bytes(tensor, changes=False) as values,
        ):
            each = len(values)
            for start in range(0, max(1, each), _ROOM):
                part = values[start : start + _ROOM]
                mine = self._publish(part, "all-gather", (each,))
                for rank, slot in enumerate(self._slots(len(part), mine)):
                    at = rank * each + start
                    numpy.copyto(found[at : at + len(part)], slot)

    def _gather_list(self, tensor: torch.Tensor, *parts: torch.Tensor) -> None:
        found = tensor.new_empty((self._size, *tensor.shape))
        self._gather(found, tensor)
        for part, values in zip(parts, found, strict=True):
            part.detach().copy_(values)

    def _exchange(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        received: list[int],
        sent: list[int],
    ) -> None:
        # A slot holds the sizes of all parts, and an equal room for each.
        table = struct.Struct(f"<{self._size}q")
        first = -(-(DESCRIPTION_BYTES + table.size) // 64) * 64
        room = (SLOT_BYTES - first) // self._size // 64 * 64
        targets, sources = _starts(received), _starts(sent)
        with (
            _as_bytes(output, changes=True) as found,
            _as_bytes(tensor, changes=False) as values,
        ):
            done, longest = 0, 1
            while done < longest:
                slot = self._segment.begin()
                mine = self._describe(slot, "all-to-all", 0)
                table.pack_into(slot.data, DESCRIPTION_BYTES, *sent)
                for rank, size in enumerate(sent):
                    part = values[sources[rank] + done :][: _left(size, done, room)]
                    at = first + rank * room
                    numpy.copyto(slot[at : at + len(part)], part)
                self._segment.enter()
                for rank in (*self._segment.others, self._rank):
                    slot = self._segment.read(rank)
                    self._require_same(slot, mine, rank)
                    sizes = table.unpack_from(slot.data, DESCRIPTION_BYTES)
                    if sizes[self._rank] != received[rank]:
                        raise self._segment.disagree(
                            f"ranks make different calls on {self.label}: "
                            f"{self._name_all([rank])} sends {sizes[self._rank]} bytes "
                            f"to {self._name_all([self._rank])}, which expects "
                            f"{received[rank]}"
                        )
                    longest = max(longest, *sizes)
                    part = found[targets[rank] + done :]
                    part = part[: _left(received[rank], done, room)]
                    at = first + self._rank * room
                    numpy.copyto(part, slot[at : at + len(part)])
                done += room

    def _barrier(self) -> None:
        mine = self._publish(numpy.empty(0, numpy.uint8), "barrier", (0,))
        self._slots(0, mine)


def _guarded(segment: SharedSegment, execute: Callable[[], None]) -> None:
    """Execute a collective on a lane on which none has failed."""
    segment.require_open()
    try:
        execute()
    except BaseException as exc:
        # Ranks are no longer in the same step.
        segment.fail(f"{type(exc).__name__}: {exc}")
        raise


def _described(row: tuple[int, ...]) -> str:
    """Return a call's description for a message."""
    kind, size_bytes, dtype, op, root = row
    if not 0 <= kind < len(_KINDS):
        return "makes another call"
    text = (
        f"makes an {_KINDS[kind]}" if kind in (0, 2, 3) else f"makes a {_KINDS[kind]}"
    )
    if kind == _KINDS.index("all-reduce"):
        types = list(_DTYPE_NUMBERS)
        text += f" ({_OP_NAMES[op]}) of {str(types[dtype]).removeprefix('torch.')}"
    if kind == _KINDS.index("broadcast"):
        text += f" from rank {root}"
    return f"{text}, {size_bytes} bytes"


def rows_of_each(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the rows for or from each rank; no splits mean equal parts.

    Raises:
        RuntimeError: the rows can't be split so.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits:
        if len(splits) != size or sum(splits) != rows:
            raise RuntimeError(
                f"the splits {list(splits)} do not divide {rows} rows among {size} "
                "ranks"
            )
        return list(splits)
    if rows % size:
        raise RuntimeError(f"{rows} rows can't be divided equally among {size} ranks")
    return [rows // size] * size


def require_filled(output: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
    """Require that every rank's tensor fills the output of an all-gather.

    Raises:
        RuntimeError: ``output`` has another number of elements.
    """
    if output.numel() != size * tensor.numel():
        raise RuntimeError(
            f"an all-gather of {tensor.numel()} elements from {size} ranks "
            f"does not fill an output of {output.numel()}"
        )


def _parts_bytes(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes for or from each rank."""
    counts = rows_of_each(tensor, splits, size)
    rows = sum(counts)
    row_bytes = tensor.numel() // rows * tensor.element_size() if rows else 0
    return [count * row_bytes for count in counts]


def _starts(sizes: Sequence[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


def _left(size: int, done: int, room: int) -> int:
    return max(0, min(room, size - done))
