"""Lanes through shared memory, between ranks of one host.

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

# Note [What resource means on shared memory]
Nothing: a collective is limited by the memory, not by connections. Buckets with
different resources on a lane share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
import sys
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy
import torch
import torch.distributed as dist

from stretto.errors import CommTimeout, PlanMismatch, StrettoError
from stretto.process_identity import Identity, own_identity
from stretto.runtime.backends.base import AbstractBackend, AbstractLanes, LaneFailure
from stretto.runtime.backends.host_work import HostThreads
from stretto.runtime.backends.shared_memory import (
    DESCRIPTION_BYTES,
    SLOT_BYTES,
    Segment,
    close_all,
    create_memory,
    new_token,
    open_memory,
    segment_bytes,
)
from stretto.runtime.store import missing_after, store_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.backends.host_work import HostWork
    from stretto.runtime.ranks import Ranks

    Array = numpy.ndarray[Any, Any]
    Combine = Callable[[Array, Sequence[Array]], None]
    """Fills the first array with the combined others, all as bytes."""

_ROOM = SLOT_BYTES - DESCRIPTION_BYTES
"""Bytes of a tensor in one slot."""

_DIRECT_BYTES = 64 * 1024
"""Up to this many bytes from all other ranks, each rank adds up everything."""

_TORCH_ELEMENTS = 32_768
"""Torch uses one thread up to this many elements (its grain size)."""

_NOTE_CHARACTERS = 500

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

    def __init__(self, number: int, segment: Segment, ranks: Ranks) -> None:
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
        return LocalBackend.name

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
        if output.numel() != self._size * tensor.numel():
            raise RuntimeError(
                f"an all-gather of {tensor.numel()} elements from {self._size} ranks "
                f"does not fill an output of {output.numel()}"
            )
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
            if tensor.device.type != LocalBackend.device_type:
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
        most = int(counts.max())
        all_indices = self._gather_padded(indices.t(), most)
        all_values = self._gather_padded(values, most)
        parts = [
            torch.sparse_coo_tensor(
                rows[:count].t(), numbers[:count], mine.shape, check_invariants=False
            )
            for rows, numbers, count in zip(
                all_indices, all_values, counts.tolist(), strict=True
            )
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        with torch.no_grad():  # a detached sparse tensor would be another one
            tensor.copy_(total.coalesce())

    def _gather_padded(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """Return every rank's rows, each filled up to ``most`` of them."""
        padded = rows.new_zeros((most, *rows.shape[1:]))
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
            done, most = 0, 1
            while done < most:
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
                    most = max(most, *sizes)
                    part = found[targets[rank] + done :]
                    part = part[: _left(received[rank], done, room)]
                    at = first + self._rank * room
                    numpy.copyto(part, slot[at : at + len(part)])
                done += room

    def _barrier(self) -> None:
        mine = self._publish(numpy.empty(0, numpy.uint8), "barrier", (0,))
        self._slots(0, mine)


def _guarded(segment: Segment, execute: Callable[[], None]) -> None:
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


def _parts_bytes(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes for or from each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits:
        if len(splits) != size or sum(splits) != rows:
            raise RuntimeError(
                f"the splits {list(splits)} do not divide {rows} rows among {size} "
                "ranks"
            )
        counts = list(splits)
    elif rows % size:
        raise RuntimeError(f"{rows} rows can't be divided equally among {size} ranks")
    else:
        counts = [rows // size] * size
    row_bytes = tensor.numel() // rows * tensor.element_size() if rows else 0
    return [count * row_bytes for count in counts]


def _starts(sizes: Sequence[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


def _left(size: int, done: int, room: int) -> int:
    return max(0, min(room, size - done))


@final
class LocalBackend(AbstractBackend):
    """Shared memory: completion is seen on the host."""

    name = "local"
    device_type = "cpu"
    completes_on_host = True
    # A thread that waits for a peer must not wake in a finalizing interpreter.
    ends_at_exit = True

    @property
    def kind(self) -> Any:
        """Torch's type: it has none for this."""
        return dist.ProcessGroup.BackendType.CUSTOM

    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require that tensors are on the CPU and that the system shares memory.

        Whether all ranks are on one host is known when lanes are opened.
        """
        del needs, ranks
        if device.type != self.device_type:
            raise PlanMismatch(
                f"local lanes send tensors on the CPU, but the model is on "
                f"{device.type}: leave lane_backend out."
            )
        if sys.platform != "linux" or not own_identity().kernel:
            raise PlanMismatch(
                "local lanes need Linux, with /proc: leave lane_backend out."
            )

    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> LocalLanes:
        """Return the lanes of a model."""
        del device, end_requests  # opening polls the store
        return LocalLanes(ranks=ranks, store_for=store_for, notes=notes)

    def collectives_per_slice(self, resource: int | None) -> int:
        """Return 1: see Note [What resource means on shared memory]."""
        del resource
        return 1

    def stream_launch(self, device: torch.device) -> None:
        """Return nothing: the host waits."""
        del device


@final
class LocalLanes(AbstractLanes):
    """Shares memory with the other ranks, and ends lanes."""

    def __init__(
        self, *, ranks: Ranks, store_for: Callable[[str], Store], notes: Store
    ) -> None:
        self._ranks = ranks
        self._store_for = store_for
        self._notes = notes
        self._lanes: dict[int, LocalLane] = {}
        self._all: weakref.WeakSet[LocalLane] = weakref.WeakSet()
        self._made: Counter[str] = Counter()

    def open(self, needs: Sequence[Need]) -> dict[Need, Any]:
        """Return the lanes for one plan; collective."""
        numbers = tuple(dict.fromkeys(n for n, _ in needs if n not in self._lanes))
        if numbers:
            segments = self._share(numbers)
            for number, segment in zip(numbers, segments, strict=True):
                lane = LocalLane(number, segment, self._ranks)
                self._lanes[number] = lane
                self._all.add(lane)
        return {need: self._lanes[need[0]] for need in needs}

    def _share(self, numbers: Sequence[int]) -> list[Segment]:
        """Return memory for new lanes, mapped by every rank.

        Raises:
            CommTimeout: a rank is lost or late.
            PlanMismatch: ranks are on several hosts, or one can't map the memory.
        """
        name = "local " + ",".join(map(str, numbers))
        # Reopened lanes must not find their first memory in the store.
        self._made[name] += 1
        name += f"/{self._made[name]}"
        held: list[int] = []
        try:
            return self._meet(name, numbers, held)
        except StrettoError:
            raise
        except OSError as exc:
            # The others would wait for this rank.
            rank = self._ranks.name(self._ranks.rank)
            need = -(-segment_bytes(self._ranks.size) * len(numbers) // 2**20)
            note = (
                f"{rank} can't open {_lanes(numbers)} with {need} MiB of shared memory:"
                f" {exc}. Plan with fewer lanes, or leave lane_backend out."
            )
            with contextlib.suppress(RuntimeError):
                self._notes.set(name, note[:_NOTE_CHARACTERS])
            raise PlanMismatch(note) from exc
        except RuntimeError as exc:
            raise store_lost(self._ranks, f"open {_lanes(numbers)}", exc) from exc
        finally:
            close_all(held)

    def _meet(
        self, name: str, numbers: Sequence[int], held: list[int]
    ) -> list[Segment]:
        """Exchange processes and memory; ``held`` gets descriptors to close."""
        ranks, store = self._ranks, self._store_for(name)
        is_first = ranks.rank == 0
        tokens = [new_token() for _ in numbers] if is_first else []
        if is_first:
            size = segment_bytes(ranks.size)
            held += [create_memory(f"stretto-lane{n}", size) for n in numbers]
        mine = {
            "process": dataclasses.asdict(own_identity()),
            "memory": held if is_first else [],
            "tokens": [token.hex() for token in tokens],
        }
        store.set(str(ranks.rank), json.dumps(mine))
        self._wait(name, store, [str(r) for r in range(ranks.size)], numbers)
        rows = [json.loads(store.get(str(r))) for r in range(ranks.size)]
        processes = [Identity(**row["process"]) for row in rows]
        _require_one_host(ranks, processes)
        if not is_first:
            for number in rows[0]["memory"]:
                held.append(open_memory(processes[0], number))
        segments = [
            Segment(
                descriptor,
                ranks=ranks,
                processes=processes,
                label=f"lane {number} on shared memory",
            )
            for number, descriptor in zip(numbers, held, strict=True)
        ]
        tokens = [bytes.fromhex(token) for token in rows[0]["tokens"]]
        for segment, token in zip(segments, tokens, strict=True):
            if is_first:
                segment.stamp(token)
        store.set(f"mapped/{ranks.rank}", "")
        keys = [f"mapped/{r}" for r in range(ranks.size)]
        self._wait(name, store, keys, numbers)
        for segment, token in zip(segments, tokens, strict=True):
            if not segment.stamped(token):
                raise OSError("the memory is not that of the first rank")
        return segments

    def _wait(
        self, name: str, store: Store, keys: Sequence[str], numbers: Sequence[int]
    ) -> None:
        """Wait for a key of each rank.

        Raises:
            CommTimeout: a rank is lost or late.
            PlanMismatch: another rank has left a note.
        """
        ranks = self._ranks
        missing = missing_after(ranks, store, keys, lambda: self._notes.check([name]))
        if missing is None:
            return
        if self._notes.check([name]):
            raise PlanMismatch(self._notes.get(name).decode())
        why = missing.gone or (
            f"{ranks.name_all(missing.ranks)} did not arrive within "
            f"{missing.waited_s:g} s. Check the logs of the missing ranks."
        )
        raise CommTimeout(
            f"{ranks.name(ranks.rank)} can't open {_lanes(numbers)}: {why}"
        )

    def abort(self) -> None:
        """Make every collective fail, here and on the other ranks."""
        for lane in list(self._all):
            lane.abort()

    def retain(self, lanes: Container[int]) -> None:
        """Release the other lanes; each ends with its last user."""
        for number in [n for n in self._lanes if n not in lanes]:
            del self._lanes[number]

    def close(self) -> None:
        """End every lane after its collectives are done; does not wait for them."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


def _require_one_host(ranks: Ranks, processes: Sequence[Identity]) -> None:
    """Require that all processes see each other.

    Raises:
        PlanMismatch: the same on every rank.
    """
    kernels = {process.kernel for process in processes}
    if len(kernels) > 1:
        by_host: dict[str, list[int]] = {}
        for rank, process in enumerate(processes):
            by_host.setdefault(process.host, []).append(rank)
        places = "; ".join(f"{ranks.name_all(r)} on {h}" for h, r in by_host.items())
        raise PlanMismatch(
            "local lanes need all ranks on one host, in one container, but there are "
            f"{len(kernels)} ({places}): leave lane_backend out."
        )


def _lanes(numbers: Sequence[int]) -> str:
    word = "lane" if len(numbers) == 1 else "lanes"
    return f"local {word} {', '.join(map(str, numbers))}"
