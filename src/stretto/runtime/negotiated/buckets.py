"""Form the buckets of negotiated tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from stretto.runtime.bucket_schedule import BucketSchedule, Slice
from stretto.runtime.negotiated.requests import DTYPES, CollectiveKind, Request
from stretto.schema import slice_bounds

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Row(NamedTuple):
    """A tensor to reduce."""

    position: int
    """The caller's index of the tensor."""

    name: str

    bucket_key: Hashable
    """Only tensors with an equal key share a bucket."""

    elements: int

    element_bytes: int


@final
class LaneLoads:
    """Bytes assigned to each lane: the next slice goes to the lane with the fewest.

    The choice can't depend on which lane is free first, because that may differ between
    ranks: on one lane all ranks must send the same slices in the same order.
    """

    def __init__(self, lanes: int) -> None:
        self._loads_bytes = [0] * lanes

    def take(self, size_bytes: int) -> int:
        """Return the lane for the next slice."""
        lane = self._loads_bytes.index(min(self._loads_bytes))
        self._loads_bytes[lane] += size_bytes
        return lane


def form_buckets(
    rows: Sequence[Row], unit_bytes: int, loads: LaneLoads
) -> list[BucketSchedule]:
    """Return buckets of tensors in this order, in the order in which they are complete.

    Tensors of one kind are joined while they fit into ``unit_bytes``, and sent as one
    slice; a larger one is a bucket of its own, in slices that differ by at most one
    element. Every element is in exactly one slice. Equal arguments give equal buckets,
    and every rank calls it with the same arguments.
    """
    found: list[BucketSchedule] = []
    waiting: dict[Hashable, list[Row]] = {}
    elements: dict[Hashable, int] = {}

    def add(members: Sequence[Row], bounds: Sequence[tuple[int, int]]) -> None:
        found.append(_bucket(len(found), members, bounds, loads))

    def close(bucket_key: Hashable) -> None:
        members = waiting.pop(bucket_key, None)
        if members:
            add(members, [(0, elements.pop(bucket_key))])

    for row in rows:
        if row.elements * row.element_bytes > unit_bytes:
            max_elements = max(1, unit_bytes // row.element_bytes)
            add([row], slice_bounds(row.elements, -(-row.elements // max_elements)))
            continue
        already = elements.get(row.bucket_key, 0)
        if already and (already + row.elements) * row.element_bytes > unit_bytes:
            close(row.bucket_key)
            already = 0
        waiting.setdefault(row.bucket_key, []).append(row)
        elements[row.bucket_key] = already + row.elements
    for bucket_key in list(waiting):
        close(bucket_key)
    return found


def row_of(position: int, request: Request) -> Row:
    """Return the row of an all-reduce; ``position`` is the caller's index."""
    bucket_key = (request.dtype, request.op, request.prescale, request.postscale)
    element_bytes = DTYPES[request.dtype]
    return Row(position, request.name, bucket_key, request.elements, element_bytes)


def _bucket(
    index: int,
    rows: Sequence[Row],
    bounds: Sequence[tuple[int, int]],
    loads: LaneLoads,
) -> BucketSchedule:
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return BucketSchedule(
        index=index,
        tensors=tuple(row.name for row in rows),
        parameters=tuple(row.position for row in rows),
        elements=bounds[-1][1],
        slices=tuple(
            Slice(
                lane=loads.take((end - start) * rows[0].element_bytes),
                resource=None,
                start=start,
                end=end,
            )
            for start, end in bounds
        ),
        label=f"{CollectiveKind.ALLREDUCE} {rows[0].name!r}{more}",
    )
