"""Pair the operations of two recordings that differ only in layout calls.

# Note [Layout calls]
Programs copy tensors into another memory layout for some numbers of samples only:
``if len(x) >= 64: x = x.contiguous()``. Such a call returns its argument's values, with
their gradient, so what runs is the same without it. A recording knows these calls by
the operators that they consist of, whatever their names. Where only one of two
recordings has one, it is left out, unless something else would change: nothing may
write into the memory of its argument or result, and nothing may read how tensors lie
in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from stretto.burst.tracing.fakes import storage_of
from stretto.burst.tracing.records import (
    SOURCE,
    Fixed,
    Record,
    Recording,
    Ref,
    renumbered,
)
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FROM_CALL = ": what runs here differs from call to call"


def differs(one: Record, batches: tuple[int, int] | None) -> SpecError:
    """Return the error of recordings that differ from an operation on.

    ``batches`` are the recordings' numbers of samples, ``None`` if they are the same.
    """
    if batches is not None:
        return SpecError(
            f"{one.place}: what runs here depends on the number of samples: a layer "
            "must compute each sample in the same way for any number of samples"
        )
    return SpecError(
        f"{one.place}{FROM_CALL} (a counter, a schedule, or a random decision), and "
        "would stay as it was at capture: pass it as an input tensor, or change the "
        "model outside of forward"
    )


@final
class Alignment:
    """Pairs operations with those of a known recording, as they are recorded."""

    def __init__(
        self, known: Sequence[Record], batches: tuple[int, int] | None
    ) -> None:
        self._known = known
        self._batches = batches
        self._places: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._number = 0
        self.left_out: tuple[dict[int, Record], dict[int, Record]] = {}, {}
        """Layout calls that only the known and only the other recording has, by their
        numbers."""

    def add(self, number: int, record: Record) -> None:
        """Add the other recording's next operation.

        Raises:
            SpecError: the known recording has another one, or none, at this place.
        """
        for i in range(self._number, len(self._known)):
            if self._is_same(self._known[i], record):
                self._leave_out_until(i)
                self._places[0][i] = self._places[1][number] = i
                self._number = i + 1
                return
            if not self._known[i].keeps_values:
                break
        if not record.keeps_values:
            at = self._number
            raise differs(
                self._known[at] if at < len(self._known) else record, self._batches
            )
        self.left_out[1][number] = record

    def end(self) -> None:
        """Require that the known recording has no further operation."""
        for i in range(self._number, len(self._known)):
            if not self._known[i].keeps_values:
                raise differs(self._known[i], self._batches)
        self._leave_out_until(len(self._known))

    def numbers(self, side: int) -> list[int]:
        """Return the numbers of one recording's operations that are in both."""
        return list(self._places[side])

    def _leave_out_until(self, end: int) -> None:
        for i in range(self._number, end):
            self.left_out[0][i] = self._known[i]

    def _is_same(self, one: Record, two: Record) -> bool:
        if not _is_same_call(one, two):
            return False
        if not one.keeps_values and not two.keeps_values:
            return True
        # Either may keep values for its number of samples only, as ``expand`` for one.
        return bool(self._argument(0, one) == self._argument(1, two))

    def _argument(self, side: int, record: Record) -> Any:
        name = argument_of(record, self.left_out[side])
        if not isinstance(name, Ref) or name == SOURCE:
            return name
        return self._places[side][name.number], name.path


def argument_of(record: Record, left_out: Mapping[int, Record]) -> Ref | Fixed:
    """Return what a layout call copies, before other calls that are left out."""
    name: Ref | Fixed = record.args[0] if record.args else SOURCE
    while isinstance(name, Ref) and name.number in left_out:
        name = left_out[name.number].args[0]
    return name


def aligned(
    first: Recording, second: Recording, batches: tuple[int, int] | None
) -> tuple[Recording, Recording]:
    """Return both recordings without the layout calls that only one of them has.

    Raises:
        SpecError: their operations differ otherwise, or leaving such a call out would
            change something.
    """
    both = Alignment(first.records, batches)
    for number, record in enumerate(second.records):
        both.add(number, record)
    both.end()
    if not any(both.left_out):
        return first, second
    sides = first, second
    for recording, left_out in zip(sides, both.left_out, strict=True):
        for record in left_out.values():
            if not _is_harmless(record, left_out, recording, sides):
                raise differs(record, batches)
    one, two = (
        _without(recording, left_out, both.numbers(side))
        for side, (recording, left_out) in enumerate(
            zip(sides, both.left_out, strict=True)
        )
    )
    return one, two


def _is_harmless(
    record: Record,
    left_out: Mapping[int, Record],
    recording: Recording,
    sides: tuple[Recording, Recording],
) -> bool:
    """Return whether a layout call can be left out; see the note."""
    name = argument_of(record, left_out)
    if isinstance(name, Fixed):
        return False  # a norm or the program may change it during forward
    given = recording.source
    if name != SOURCE:
        given = recording.records[name.number].tensors[name.path]
    (made,) = record.tensors.values()
    if given is None or not recording.writers.keys().isdisjoint(
        (storage_of(given), storage_of(made))
    ):
        return False
    calls = [call for side in sides for one in side.records for call in one.inner]
    if any("as_strided" in call.operator for call in calls):
        return False
    return given.stride() == made.stride() or not any(call.is_foreign for call in calls)


def _without(
    recording: Recording, left_out: Mapping[int, Record], kept: Sequence[int]
) -> Recording:
    """Return a recording without layout calls, with its operations renumbered."""
    if not left_out:
        return recording
    numbers = {old: new for new, old in enumerate(kept)}

    def name_of(name: Ref | Fixed) -> Ref | Fixed:
        while isinstance(name, Ref) and name.number in left_out:
            name = left_out[name.number].args[0]
        if isinstance(name, Fixed) or name == SOURCE:
            return name
        return Ref(numbers[name.number], name.path)

    made = renumbered(recording, numbers, name_of)
    made.refs = {key: name_of(name) for key, name in recording.refs.items()}
    return made


def _is_same_call(one: Record, two: Record) -> bool:
    same_target = one.target == two.target or (
        getattr(one.target, "__func__", 1) is getattr(two.target, "__func__", 2)
        and getattr(one.target, "__self__", 1) is getattr(two.target, "__self__", 2)
    )
    return one.kind == two.kind and same_target and one.context == two.context
