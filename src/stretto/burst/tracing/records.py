"""The parts of a recording: operations, and names of the tensors in them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from stretto.burst.tracing.fakes import storage_of
from stretto.burst.tracing.inner_calls import InnerCall

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from stretto.burst.tracing.rerun import TorchCalls


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor from an earlier operation: its number, and the place in its result."""

    number: int

    path: tuple[Any, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Fixed:
    """A parameter, buffer or other tensor that the module holds, by name."""

    name: str


SOURCE = Ref(-1)
"""The model's input."""


@final
@dataclass(frozen=True, slots=True)
class Context:
    """The modes that the module set around an operation."""

    grad: bool = True

    autocast: tuple[tuple[str, torch.dtype, bool, bool], ...] = ()


@final
@dataclass(kw_only=True, eq=False)
class Record:
    """One operation."""

    kind: str
    """``call_function``, ``call_method`` or ``call_module``."""

    target: Any

    args: tuple[Any, ...]

    kwargs: dict[str, Any]

    place: str
    """Place in the user's code, as ``file:line``."""

    context: Context

    tensors: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """Its results, without values, by place in the result."""

    draws: bool = False
    """Whether it draws random numbers other than by dropout modules."""

    writes: int | None = None
    """The position of the argument into which it writes."""

    aliases: bool = False
    """Whether its result shares memory with an argument."""

    norms: tuple[str, ...] = ()
    """Batch norms called in it, in order."""

    keeps_state: bool = False
    """Whether it writes into buffers that are not a batch norm's."""

    borrowed: tuple[str, ...] = ()
    """Parameters of other modules that its hooks or its own code read."""

    inner: tuple[InnerCall, ...] = ()
    """The operators that it calls."""

    keeps_values: bool = False
    """Whether its result has the values of its first argument, and their gradient."""


@final
class Recording:
    """The operations of one forward."""

    def __init__(self, calls: TorchCalls) -> None:
        self.records: list[Record] = []
        self.calls = calls
        """The calls as the forward sees them, see `rerun`."""

        self.constants: dict[str, Any] = {}
        """Tensors and other objects that belong to no module, by a generated name."""

        self.cached: dict[str, Tensor] = {}
        """Tensors without values that an earlier call left in caches, by name."""

        self.asks_for_gradients = False
        """Whether the user's code reads which tensors need a gradient."""

        self.without_gradient = ""
        """The line that found so of a tensor that needs none unless the input does."""

        self.reads_layout = ""
        """The line that reads how a tensor lies in memory."""

        self.reads_offset = ""
        """The line that reads where in its storage a tensor begins."""

        self.sets_variables = False
        """Whether forward sets a context variable to a number."""

        self.source: Tensor | None = None
        """The forward's input, without values."""

        self.returned: Any = None
        """The forward's result."""

        self.output: Any = None
        """It with `Ref` for tensors."""

        self.refs: dict[int, Ref | Fixed] = {}
        """The names of tensors that outlive the recording, by id."""

        self.writers: dict[int, list[int]] = {}
        """By storage: the operations that wrote into it."""

        self.fixed_memory: set[int] = set()
        """Memory of what is computed, also within operations, from constants alone."""

    def source_line_of(self, tensor: Tensor) -> str:
        """Return the line that made a tensor, or nothing."""
        ref = self.refs.get(id(tensor))
        if not isinstance(ref, Ref) or ref == SOURCE:
            return ""
        return self.records[ref.number].place

    def not_constant(self, tensor: Tensor, varying: Container[str]) -> str:
        """Return from what a tensor is computed that differs between calls, if any.

        Args:
            tensor: made in the recording.
            varying: names of parameters, and of buffers that forward updates.
        """
        left = self._sources_of(tensor)
        seen: set[Ref | Fixed] = set()
        while left:
            ref = left.pop()
            if ref is None:
                if storage_of(tensor) not in self.fixed_memory:
                    return "a tensor that capture does not see"
                continue  # made by a module with hooks, which runs as it is
            if ref in seen:
                continue
            seen.add(ref)
            if isinstance(ref, Fixed):
                if ref.name in varying:
                    return repr(ref.name)
                continue
            if ref == SOURCE:
                return "the samples"
            record = self.records[ref.number]
            if record.draws:
                return "random numbers"
            if record.kind == "call_module":
                return f"the output of module {record.target!r}"
            left += _refs_in(_values_read(record))
            for made in record.tensors.values():
                left += self._writes_into(made)
        return ""

    def _sources_of(self, tensor: Tensor) -> list[Ref | Fixed | None]:
        return [self.refs.get(id(tensor)), *self._writes_into(tensor)]

    def _writes_into(self, tensor: Tensor) -> list[Ref | Fixed | None]:
        return [Ref(n) for n in self.writers.get(storage_of(tensor), ())]


def names_in(value: Any) -> Iterator[str]:
    """Yield the names of the held tensors among an operation's arguments."""
    for ref in _refs_in(value):
        if isinstance(ref, Fixed):
            yield ref.name


def renamed(value: Any, name_of: Callable[[Ref | Fixed], Ref | Fixed]) -> Any:
    """Return an operation's arguments, or an output, with other names of tensors."""
    if isinstance(value, (Ref, Fixed)):
        return name_of(value)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(renamed(part, name_of) for part in parts))
    if isinstance(value, dict):
        return {key: renamed(inner, name_of) for key, inner in value.items()}
    if not isinstance(value, (tuple, list)) or isinstance(value, torch.Size):
        return value
    inner = [renamed(part, name_of) for part in value]
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def renumbered(
    recording: Recording,
    numbers: Mapping[int, int],
    name_of: Callable[[Ref | Fixed], Ref | Fixed],
) -> Recording:
    """Return a recording of some of its operations.

    Args:
        recording: All operations.
        numbers: New numbers of those that stay, by their numbers, in order.
        name_of: Returns the new name of a tensor.
    """
    made = copy.copy(recording)
    made.records = [
        replace(
            record,
            args=renamed(record.args, name_of),
            kwargs=renamed(record.kwargs, name_of),
        )
        for record in (recording.records[number] for number in numbers)
    ]
    made.output = renamed(recording.output, name_of)
    made.writers = {
        storage: [numbers[number] for number in written if number in numbers]
        for storage, written in recording.writers.items()
    }
    return made


_LIKE = ("to", "type_as")
"""Methods that read of a second tensor only its type and device."""


def _values_read(record: Record) -> Any:
    """Return the arguments of which an operation reads more than sizes and types."""
    name = str(getattr(record.target, "__name__", record.target))
    if name in _LIKE:
        return record.args[:1]
    if name.startswith("new_") or name.endswith("_like"):
        return record.args[1:], {**record.kwargs, "input": None}
    return record.args, record.kwargs


def _refs_in(value: Any) -> list[Ref | Fixed | None]:
    """Return the names of tensors in an operation's arguments."""
    if isinstance(value, (Ref, Fixed)):
        return [value]
    if isinstance(value, slice):
        return _refs_in((value.start, value.stop, value.step))
    if isinstance(value, dict):
        return _refs_in(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return [ref for part in value for ref in _refs_in(part)]
    return []
