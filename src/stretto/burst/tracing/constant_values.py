"""Compute the values of constants by which forward's code decides.

# Note [Values of constants]
A recording has no values, but code may read some that are the same in every step:
``float(self.scale)`` of a buffer, ``torch.linspace(0, 1, 4).tolist()``, or a mask of
constants as an index. Operators that read neither samples nor trained parameters are
noted while a forward is recorded. Once a value is read, all noted ones are computed, in
their order, with copies of the tensors that the program holds. The result is a part of
the recording, as a number in the code is. So these tensors must keep their values: they
are watched from step to step (see `reads`), and checks compute with them as they are.
Tensors that forward itself changes, such as statistics, have no such values.
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
class ConstantValues:
    """Values of tensors that are computed from constants alone.

    Args:
        storage_of: Returns an identifier of a tensor's memory.
    """

    def __init__(self, storage_of: Callable[[Tensor], int]) -> None:
        self._storage_of = storage_of
        self._sources: dict[int, frozenset[int]] = {}
        """By the memory of what has values: the ids of held tensors that it reads."""
        self._noted: list[tuple[Any, Any, Any, Any]] = []
        """Operators that are not computed yet, with arguments and results."""
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor without values, or of a held one: it, and its copy."""
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
        self._values[id(twin)] = twin, tensor
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
        is_written = operator._schema.is_mutable  # noqa: SLF001
        results = list(_tensors(result))
        if not results and not is_written:
            return
        if _is_of_sizes(operator) and args and isinstance(args[0], Tensor):
            args = (_form_of(args[0]), *args[1:])
        given = list(_tensors((args, kwargs)))
        sources = self._sources_of(operator, given, is_written=is_written)
        if sources is None:
            for tensor in (*results, *written_by(operator, args, kwargs)):
                self._sources.pop(self._storage_of(tensor), None)
            return
        for tensor in results:
            self._sources[self._storage_of(tensor)] = sources
        self._noted.append((operator, args, kwargs, result))

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
        given = _tensors((args, kwargs))
        sources = self._sources_of(operator, given, is_written=False)
        if sources is None or operator in _INDEXED:
            return None
        with _plainly():
            values = pytree.tree_map(self._value_of, (args, kwargs))
            result = operator(*values[0], **values[1])
        self._note_read(sources)
        return (pytree.tree_map(lambda x: self._named(x, sources, twin_of), result),)

    def _named(
        self, value: Any, sources: frozenset[int], twin_of: Callable[[Tensor], Tensor]
    ) -> Any:
        if not isinstance(value, Tensor):
            return value
        twin = twin_of(value)
        self._values[id(twin)] = twin, value
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

    def value_of(self, tensor: Tensor, *, decides: bool = True) -> Tensor | None:
        """Return a copy of a constant with its values, or None if it has none.

        ``decides``: whether forward may decide by it.
        """
        sources = self._sources_of(_DETACH, (tensor,), is_written=False)
        if sources is None:
            return None
        with _plainly():
            value: Tensor = self._value_of(tensor)
        if decides:
            self._note_read(sources)
        return value

    def _note_read(self, sources: frozenset[int]) -> None:
        self.read |= {number: self._held[number] for number in sources}

    def _value_of(self, value: Any) -> Any:
        """Return an argument with values, after all that is noted is computed."""
        self._compute()
        return self._given(value)

    def _compute(self) -> None:
        noted, self._noted = self._noted, []
        for operator, args, kwargs, result in noted:
            more, named = pytree.tree_map(self._given, (args, kwargs))
            found = operator(*more, **named)
            pairs = zip(_tensors(result), _tensors(found), strict=True)
            for twin, value in pairs:
                self._values.setdefault(id(twin), (twin, value))

    def _given(self, value: Any) -> Any:
        if isinstance(value, _Empty):
            return value.made()
        if not isinstance(value, Tensor):
            return value
        known = self._values.get(id(value))
        if known is None:  # of the program
            known = self._values[id(value)] = value, value
        twin, found = known
        if id(found) in self._held:  # what is written into it stays here
            found = found.detach().clone()
            self._values[id(value)] = twin, found
        return found


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
            yield from (t for t in _tensors(given) if isinstance(t, FakeTensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


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
