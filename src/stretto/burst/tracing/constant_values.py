"""Compute the values of constants by which forward's code decides.

# Note [Values of constants]
A recording has no values, but code may read some that are the same in every step:
``float(self.scale)`` of a buffer, ``torch.linspace(0, 1, 4).tolist()``, or a mask of
constants as an index. Operators that read neither samples nor trained parameters are
noted while a forward is recorded. Once a value is read, those that it depends on are
computed, in their order, with copies of the tensors that the program holds. The result
is a part of the recording, as a number in the code is. So these tensors must keep their
values: they are watched from step to step (see `reads`), and checks compute with them
as they are. Tensors that forward itself changes, such as statistics, have no such
values.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from stretto.burst.memory import tensors_among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
}
"""Operators whose second argument is a list of indices."""

_OF_SIZES = frozenset(
    (
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)
"""Operators that read only the size and type of their first argument."""

_MASKS = (torch.bool, torch.uint8)


@functools.cache
def reads_values(operator: Any) -> bool:
    """Return whether an operator gives a number, or a size, that is made of values."""
    return operator in _INDEXED or not {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    }.isdisjoint(operator.tags)


@functools.cache
def _is_of_sizes(operator: Any) -> bool:
    return operator.namespace == "aten" and operator._opname in _OF_SIZES  # noqa: SLF001


@functools.cache
def _is_constant(operator: Any) -> bool:
    """Return whether an operator of torch gives the same for the same arguments."""
    is_seeded = torch.Tag.nondeterministic_seeded in operator.tags
    return not is_seeded and operator.namespace in ("aten", "prims", "prim")


@final
@dataclass(frozen=True, slots=True)
class _Empty:
    """The size and type of an argument of which nothing else is read."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        """Return such a tensor."""
        return torch.empty_strided(
            self.size, self.strides, dtype=self.dtype, device=self.device
        )


@final
@dataclass(frozen=True, slots=True)
class _Noted:
    """An operator on constants alone, as it was called without values."""

    operator: Any
    args: Any
    kwargs: Any
    result: Any


@final
class ConstantValues:
    """Values of tensors that are computed from constants alone.

    Args:
        storage_of: Returns an identifier of a tensor's memory.
    """

    def __init__(self, storage_of: Callable[[Tensor], int]) -> None:
        self._storage_of = storage_of
        self._sources: dict[int, frozenset[int]] = {}
        """By the memory of what has values: the ids of held tensors that it reads."""
        self._noted: list[_Noted] = []
        self._makers: dict[int, list[int]] = {}
        """By memory: the numbers of noted operators that gave it or wrote into it."""
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        """By their ids: tensors without values, each with one that has its values."""
        self._held: dict[int, Tensor] = {}
        self._left_out: dict[int, Tensor] = {}
        """By their memory: tensors that have no values."""
        self.read: dict[int, Tensor] = {}
        """Tensors of the program by whose values code has decided, by their ids."""

    def hold(self, twin: Tensor, tensor: Tensor) -> None:
        """Add a tensor that training does not change, and its twin without values."""
        if not _may_be_copied(tensor):
            self.leave_out(twin)
            return
        self._held[id(tensor)] = tensor
        self._known[id(twin)] = twin, tensor
        storage = self._storage_of(twin)
        if storage not in self._left_out:
            known = self._sources.get(storage, frozenset())
            self._sources[storage] = known | {id(tensor)}

    def leave_out(self, twin: Tensor) -> None:
        """Note that the memory of a tensor without values has samples, or changes."""
        storage = self._storage_of(twin)
        self._left_out[storage] = twin
        self._sources.pop(storage, None)

    def note(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that has run, if it reads constants alone."""
        is_mutable = operator._schema.is_mutable  # noqa: SLF001
        results = list(tensors_among(result))
        if not results and not is_mutable:
            return
        if _is_of_sizes(operator) and args and isinstance(args[0], Tensor):
            args = (_form_of(args[0]), *args[1:])
        written = list(written_by(operator, args, kwargs)) if is_mutable else []
        memory = {self._storage_of(tensor) for tensor in (*results, *written)}
        given = tensors_among((args, kwargs))
        sources = self._sources_of(operator, given, is_written=is_mutable)
        for storage in memory:
            if sources is None:
                self._sources.pop(storage, None)
            else:
                self._sources[storage] = sources
                self._makers.setdefault(storage, []).append(len(self._noted))
        if sources is not None:
            self._noted.append(_Noted(operator, args, kwargs, result))

    def _sources_of(
        self, operator: Any, given: Iterable[Tensor], *, is_written: bool
    ) -> frozenset[int] | None:
        """Return the ids of held tensors that are read; None: not only constants."""
        if not _is_constant(operator):
            return None
        found: frozenset[int] = frozenset()
        for tensor in given:
            if isinstance(tensor, FakeTensor):
                known = self._sources.get(self._storage_of(tensor))
                if known is None:
                    return None
                found |= known
            elif is_written or not _may_be_copied(tensor):
                return None
            else:
                self._held[id(tensor)] = tensor
                found |= {id(tensor)}
        return found

    def computed(
        self, operator: Any, args: Any, kwargs: Any, twin_of: Callable[[Tensor], Tensor]
    ) -> tuple[Any] | None:
        """Return what an operator gives that reads values, or None if it has none.

        ``twin_of`` returns a tensor without values for one that has some.
        """
        given = list(tensors_among((args, kwargs)))
        sources = self._sources_of(operator, given, is_written=False)
        if sources is None or operator in _INDEXED:
            return None
        with _plainly():
            more, named = self._with_values((args, kwargs))
            result = operator(*more, **named)
        self._note_read(sources)
        return (pytree.tree_map(lambda x: self._named(x, sources, twin_of), result),)

    def _named(
        self, value: Any, sources: frozenset[int], twin_of: Callable[[Tensor], Tensor]
    ) -> Any:
        if not isinstance(value, Tensor):
            return value
        twin = twin_of(value)
        self._known[id(twin)] = twin, value
        self._sources[self._storage_of(twin)] = sources
        return twin

    def with_numbers(
        self, operator: Any, args: Any, twin_of: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return an index's arguments with numbers in place of masks of constants."""
        if operator not in _INDEXED:
            return args
        indices: list[Any] = []
        for index in args[1]:
            value = self.value_of(index) if _is_mask(index) else None
            if value is None:
                indices.append(index)
                continue
            with _plainly():
                numbers = value.nonzero().unbind(1)
            indices += map(twin_of, numbers)
        return (args[0], indices, *args[2:])

    def has_value(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from constants alone."""
        return self._sources_of(_DETACH, (tensor,), is_written=False) is not None

    def value_of(self, tensor: Tensor, *, decides: bool = True) -> Tensor | None:
        """Return a constant with its values, or None if it has none.

        ``decides``: whether forward may decide by it.
        """
        sources = self._sources_of(_DETACH, (tensor,), is_written=False)
        if sources is None:
            return None
        with _plainly():
            value: Tensor = self._with_values(tensor)
        if decides:
            self._note_read(sources)
        return value

    def read_out(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return what a method of a constant gives that is no tensor, or None."""
        value = self.value_of(args[0])
        if value is None:
            return None
        with _plainly():
            return (func(value, *args[1:], **kwargs),)

    def _note_read(self, sources: frozenset[int]) -> None:
        self.read |= {number: self._held[number] for number in sources}

    def _with_values(self, value: Any) -> Any:
        """Return arguments with values, by computing what they depend on.

        In the order of the calls, as some write in place. Values are not kept: together
        they may be large.
        """
        found: dict[int, Tensor] = {}

        def given(value: Any) -> Any:
            if isinstance(value, _Empty):
                return value.made()
            if not isinstance(value, Tensor):
                return value
            if id(value) not in found:  # of the program, or held
                _, known = self._known.get(id(value), (value, value))
                found[id(value)] = known.detach().clone()
            return found[id(value)]

        for number in sorted(self._numbers_before(value)):
            one = self._noted[number]
            more, named = pytree.tree_map(given, (one.args, one.kwargs))
            made = one.operator(*more, **named)
            pairs = zip(tensors_among(one.result), tensors_among(made), strict=True)
            for twin, tensor in pairs:
                found.setdefault(id(twin), tensor)
        return pytree.tree_map(given, value)

    def _numbers_before(self, value: Any) -> set[int]:
        """Return the numbers of the operators on which the memory of values depends."""
        numbers: set[int] = set()
        seen: set[int] = set()
        left = [self._storage_of(t) for t in tensors_among(value)]
        while left:
            storage = left.pop()
            if storage in seen:
                continue
            seen.add(storage)
            for number in self._makers.get(storage, ()):
                if number not in numbers:
                    numbers.add(number)
                    one = self._noted[number]
                    left += map(self._storage_of, tensors_among((one.args, one.kwargs)))
        return numbers


def _is_mask(index: Any) -> bool:
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - not forward's own calls
        return isinstance(index, Tensor) and index.dtype in _MASKS


_DETACH = torch.ops.aten.detach.default


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Compute with values, whatever modes are entered."""
    with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
        yield


def written_by(operator: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors without values into which an operator writes."""
    for i, argument in enumerate(operator._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (t for t in tensors_among(given) if isinstance(t, FakeTensor))


def _form_of(tensor: Tensor) -> _Empty:
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - not forward's own calls
        size, strides = tuple(tensor.shape), tensor.stride()
        return _Empty(size, strides, tensor.dtype, tensor.device)


def _may_be_copied(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one that training does not change."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - not forward's own calls
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and not tensor.requires_grad
            and tensor.device.type != "meta"
        )
