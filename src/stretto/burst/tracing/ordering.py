"""Put fixed operations in an order that all processes share.

# Note [Where fixed operations go]
A forward may run over a set of strings, whose order differs by process, and fill tables
that layers look up. Such operations are fixed and have no effects, so each is placed
where its result is first read. Then names, a layer's tensors and the digest of all
operations depend on the program only. An operation that reads the input, draws, or has
to do with memory that is written keeps its place among the others.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, final

from stretto.burst.tracing.records import SOURCE, Fixed, Ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.burst.tracing.records import Recording

Arguments = tuple[Any, Any]
"""An operation's positional and named arguments, with `Ref` and `Fixed` for tensors."""

_CONSTANT = re.compile(r"<constant \d+>")
_REF = re.compile(r"\bRef\(number=(\d+)")


@final
class Order:
    """The order in which a recording's operations enter the graph."""

    def __init__(self, recording: Recording, arguments: Sequence[Arguments]) -> None:
        self._records = recording.records
        self._reads = [list(_names_in(given)) for given in arguments]
        bound = self._bound()
        self.numbers: list[int] = []
        """The operations' numbers in the recording."""
        placed: set[int] = set()
        for number in range(len(self._records)):
            if number in bound:
                self._place(number, placed)
        if isinstance(recording.output, Ref) and recording.output != SOURCE:
            self._place(recording.output.number, placed)
        self._places = {number: i for i, number in enumerate(self.numbers)}
        self._constants: dict[str, str] = {}
        for number in self.numbers:
            for name in self._reads[number]:
                if isinstance(name, Fixed) and name.name in recording.constants:
                    new = f"constant_{len(self._constants)}"
                    self._constants.setdefault(name.name, new)

    @property
    def constants(self) -> dict[str, str]:
        """Names of the tensors that no module holds: as recorded, and in this order."""
        return dict(self._constants)

    def renamed(self, text: str) -> str:
        """Return an operation's text with numbers of this order."""
        text = _CONSTANT.sub(lambda m: self._constants.get(m[0], m[0]), text)
        return _REF.sub(
            lambda m: f"Ref(number={self._places.get(int(m[1]), m[1])}", text
        )

    def _place(self, number: int, placed: set[int]) -> None:
        """Append an operation behind those that it reads."""
        work = [number]
        while work:
            last = work[-1]
            missing = [
                name.number
                for name in self._reads[last]
                if isinstance(name, Ref)
                and name != SOURCE
                and name.number not in placed
            ]
            if missing and last not in placed:
                work.append(missing[0])
                continue
            work.pop()
            if last not in placed:
                placed.add(last)
                self.numbers.append(last)

    def _bound(self) -> set[int]:
        """Return the operations that keep their order."""
        if any(record.keeps_state for record in self._records):
            return set(range(len(self._records)))
        written = self._written()
        norms = tuple(f"{n}." for record in self._records for n in record.norms)
        bound: set[int] = set()
        for number, record in enumerate(self._records):
            is_bound = record.draws or record.writes is not None or number in written
            for name in self._reads[number]:
                if isinstance(name, Fixed):
                    is_bound |= name in written or name.name.startswith(norms)
                else:
                    is_bound |= name == SOURCE or name.number in bound
            if is_bound:
                bound.add(number)
        return bound

    def _written(self) -> set[int | Fixed]:
        """Return operations and tensors whose memory is written, by any view."""
        found: set[int | Fixed] = set()
        work: list[Ref | Fixed] = []
        for record, reads in zip(self._records, self._reads, strict=True):
            if record.writes is not None:
                work += reads
        while work:
            name = work.pop()
            key = name if isinstance(name, Fixed) else name.number
            if name == SOURCE or key in found:
                continue
            found.add(key)
            if isinstance(name, Ref):
                work += self._reads[name.number]
        return found


def _names_in(value: Any) -> Iterator[Ref | Fixed]:
    """Yield the tensors among an operation's arguments, in order."""
    if isinstance(value, (Ref, Fixed)):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _names_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _names_in(inner)
    elif isinstance(value, slice):
        yield from _names_in((value.start, value.stop, value.step))
