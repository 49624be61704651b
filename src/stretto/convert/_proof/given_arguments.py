"""The arguments of a call, and what is certain of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import libcst as cst

from stretto.convert._proof.batch_values import Constant, Rows, Seq, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """The arguments of a call, and where it is."""

    node: cst.Call
    args: tuple[Value, ...]
    options: Mapping[str, Value]
    in_step: bool
    """Whether ranks draw their own random numbers by then."""
    repeated: set[cst.Call] = field(default_factory=set)
    """Gets the calls that draw the same numbers on each rank for its samples."""
    unsure: set[cst.Call] = field(default_factory=set)
    """Gets the calls of layers that may take a batch for one sequence."""
    batched: set[cst.Call] = field(default_factory=set)
    """Gets those that are shown to take a batch."""

    tested: set[cst.Call] = field(default_factory=set)
    """Gets those of whose results the script asks the number of dimensions."""

    def test_rank(self, value: Value | None) -> None:
        """Note that the script asks a tensor for its number of dimensions."""
        if isinstance(value, Rows) and value.layer is not None:
            self.tested.add(value.layer)

    def show_rank(self, value: Value | None, least: int) -> None:
        """Note that an operation needs a number of dimensions."""
        if isinstance(value, Rows) and value.layer is not None and least >= value.rank:
            self.batched.add(value.layer)

    def get(self, name: str, place: int = -1) -> Value | None:
        """Return an argument, given by name or by position."""
        if name in self.options:
            return self.options[name]
        return self.args[place] if 0 <= place < len(self.args) else None

    @property
    def all(self) -> list[Value]:
        """Return the values of all arguments."""
        return [*self.args, *self.options.values()]


def known_ints(value: Value | None) -> list[int] | None:
    """Return the numbers that a value certainly is."""
    if isinstance(value, Constant) and isinstance(value.value, int):
        return [int(value.value)]
    if isinstance(value, Seq):
        out: list[int] = []
        for part in value.items:
            inner = known_ints(part)
            if inner is None:
                return None
            out += inner
        return out
    return None


def known_int(value: Value | None) -> int | None:
    """Return the number that a value certainly is."""
    numbers = known_ints(value) if isinstance(value, Constant) else None
    return None if numbers is None else numbers[0]


def known_text(value: Value | None) -> str | None:
    """Return the text that a value certainly is."""
    return (
        value.value
        if isinstance(value, Constant) and isinstance(value.value, str)
        else None
    )


_ANY_CALL = cst.Call(func=cst.Name("call"))


def as_call(node: cst.CSTNode) -> cst.Call:
    """Return a node if it is a call, else a call without arguments."""
    return node if isinstance(node, cst.Call) else _ANY_CALL
