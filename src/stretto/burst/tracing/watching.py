"""Compare plain state that forward reads with what it was.

# Note [A watch is cheap]
Each step consults a watch. Most of its rows hold one value whose identity decides, such
as a number, a function or a class. Others are copied again and compared.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import Tensor

from stretto.burst.tracing.freezing import (
    ATOMS,
    CODE,
    DESCRIPTORS,
    SPACES,
    ContentFreezer,
    Freezer,
    is_users,
    registry_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    Test = tuple[Callable[[], bool], str]
    """Whether something is as it was, and its name."""

MISSING = object()


class Held(Protocol):
    """The source of a row: the ``__dict__`` of a module or file, or a view like it."""

    @property
    def get(self) -> Any:
        """The function that returns the value under a name."""


@final
class Cell:
    """A variable that a function closes over, read like a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, _key: str, missing: Any = None, /) -> Any:
        """Return the content of the cell."""
        try:
            return self._cell.cell_contents
        except ValueError:  # not set yet
            return missing


@final
class _Attributes:
    """A class's attributes, also those of its bases, read like a dictionary."""

    def __init__(self, kind: type) -> None:
        self.get = partial(getattr, kind)


@final
@dataclass(frozen=True, slots=True)
class _Row:
    get: Any
    """Reads from its place: takes the key and what to return without one."""

    key: Any

    value: Any

    frozen: Any
    """``None`` if identity decides."""

    name: str

    freeze: Freezer | ContentFreezer

    is_quickly_same: Any
    """Whether the same object has kept its content, as far as that shows without a
    copy; otherwise the content is compared."""

    def holds(self) -> bool:
        value = self.get(self.key, MISSING)
        if self.frozen is None:
            return value is self.value
        if value is self.value and self.is_quickly_same(value):
            return True
        try:
            return bool(self.freeze(value) == self.frozen)
        except Exception:  # noqa: BLE001 - of the user's code, such as __getattribute__
            return False

    def now(self) -> _Row:
        """Return a row of the value that is there now."""
        value = self.get(self.key, MISSING)
        is_copied = value is not MISSING and not isinstance(value, _BY_IDENTITY)
        return replace(
            self,
            value=value,
            frozen=self.freeze(value) if is_copied else None,
            is_quickly_same=_quick_test(value, self.freeze),
        )


_BY_IDENTITY = (*CODE, *DESCRIPTORS, types.FunctionType)


def _quick_test(value: Any, freeze: Freezer | ContentFreezer) -> Callable[[Any], bool]:
    """Return a test of the same object that is True only if its content is as now."""
    if isinstance(value, ATOMS) or freeze.is_by_identity(value):
        return _always
    if type(value) in _CONTAINERS and _is_empty(value):
        return _is_empty
    if type(value) is types.FunctionType and not value.__dict__:
        return _has_no_fields
    return _never


_CONTAINERS = (dict, list, set, OrderedDict)


def _always(_value: Any) -> bool:
    return True


def _never(_value: Any) -> bool:
    return False


def _is_empty(value: Any) -> bool:
    return not value and not getattr(value, "__dict__", None)


def _has_no_fields(function: Any) -> bool:
    return not function.__dict__


@final
class Watch:
    """Values that forward read, as they were when it was recorded."""

    def __init__(
        self,
        rows: Collection[_Row],
        tests: Collection[Test],
        inner: Mapping[int, str] | None = None,
    ) -> None:
        self._quick = [
            (row.get, row.key, row.value, row)
            for row in rows
            if row.frozen is None or row.is_quickly_same is _always
        ]
        self._empty = [
            (row.get, row.key, row.value, row)
            for row in rows
            if row.frozen is not None and row.is_quickly_same is _is_empty
        ]
        quick = {id(row) for *_, row in (*self._quick, *self._empty)}
        self._rows = [row for row in rows if id(row) not in quick]
        self._tests = list(tests)
        self.tensors = dict(inner or {}) | {
            id(row.value): row.name for row in rows if isinstance(row.value, Tensor)
        }
        """The names of what holds tensors that forward reads, by their ids."""

    def __bool__(self) -> bool:
        return bool(self._quick or self._empty or self._rows or self._tests)

    def followed(self) -> Watch:
        """Return a watch of the values as they are now."""
        rows = [*(row for *_, row in (*self._quick, *self._empty)), *self._rows]
        return Watch(
            [row if row.holds() else row.now() for row in rows],
            self._tests,
            self.tensors,
        )

    def all_changed(self) -> dict[str, Any]:
        """Return the key of each value that has changed, by its name."""
        pairs = [(row, row.name) for *_, row in (*self._quick, *self._empty)]
        pairs += [(row, row.name) for row in self._rows]
        found = {name: row.key for row, name in pairs if not row.holds()}
        return found | {name: name for holds, name in self._tests if not holds()}

    def changed_hooks(self) -> dict[str, Any]:
        """Return hooks, which have a number, that changed; by their names."""
        rows = [*(row for *_, row in (*self._quick, *self._empty)), *self._rows]
        return {
            row.name: row.value
            for row in rows
            if isinstance(row.key, int) and not row.holds()
        }

    def without(self, names: Collection[str]) -> Watch:
        """Return a watch of the values with other names."""
        rows = [row for *_, row in (*self._quick, *self._empty)] + self._rows
        return Watch(
            [row for row in rows if row.name not in names],
            [test for test in self._tests if test[1] not in names],
            self.tensors,
        )

    def changed(self) -> str | None:
        """Return the name of a value that has changed, or None."""
        for get, key, value, row in self._quick:
            if get(key, MISSING) is not value and not row.holds():
                return row.name
        for get, key, value, row in self._empty:
            if (value or get(key, MISSING) is not value) and not row.holds():
                return row.name
        for row in self._rows:
            if not row.holds():
                return row.name
        for holds, name in self._tests:
            if not holds():
                return name
        return None


@final
class WatchedRows:
    """Collects a watch's rows.

    Args:
        names: Attributes that forward may read; None: it makes names while it runs.
        in_code: The names that functions called by forward contain.
        known: The ids of modules that are watched otherwise.
        is_called: Whether forward calls a function.
        tensors: Whether tensors are compared.
        contents: Whether what is in them is, too.
    """

    def __init__(
        self,
        names: Collection[str] | None,
        in_code: Collection[str],
        known: Collection[int],
        is_called: Callable[[Any], bool],
        *,
        tensors: bool,
        contents: bool = False,
    ) -> None:
        self._freeze = Freezer(names, known, tensors=tensors, contents=contents)
        self._names, self._in_code = names, in_code
        self._is_called, self._tensors = is_called, tensors
        self._rows: dict[tuple[int, Any], _Row] = {}
        self._deep: set[int] = set()
        self._tests: list[Test] = []
        self._views: dict[int, _Attributes] = {}
        self._held: list[Any] = []
        """Keeps ids unique."""
        self._followed: set[int] = set()
        self._inner: dict[int, str] = {}
        """The names of what holds tensors, by the tensors' ids."""

    def watch(self) -> Watch:
        """Return the watch of all rows, after following classes and modules."""
        left = self._freeze.spaces
        while left:
            _, space = left.popitem()
            self.follow(space)
        return Watch(list(self._rows.values()), self._tests, self._inner)

    def _frozen(self, value: Any, name: str) -> Any:
        """Return a copy of a value, after noting the tensors in it."""
        self._freeze.tensors = set()
        try:
            copy = self._freeze(value)
            for number in self._freeze.tensors:
                self._inner.setdefault(number, name)
            return copy
        finally:
            self._freeze.tensors = None

    def add(self, held: Held, key: Any, name: str) -> None:
        """Add a value under a name."""
        if (id(held), key) in self._rows:
            return
        value = held.get(key, MISSING)
        frozen = None
        is_new = value is not MISSING and id(value) not in self._deep
        if self._is_called(value) and registry_of(value) is None:
            pass  # see `add_function`
        elif isinstance(value, (*CODE, *DESCRIPTORS)):
            if isinstance(value, SPACES):
                self._freeze.meet(value)
        elif isinstance(value, ATOMS) or is_new:
            self._deep.add(id(value))
            frozen = self._frozen(value, name)
        elif not self._tensors:
            return
        quick = _quick_test(value, self._freeze)
        row = _Row(held.get, key, value, frozen, name, self._freeze, quick)
        self._held.append(held)
        self._rows[id(held), key] = row

    def add_content(self, held: Held, key: Any, name: str) -> None:
        """Add a tensor of which only the values count, and not which object it is."""
        freeze = ContentFreezer()
        value = held.get(key, MISSING)
        row = _Row(held.get, key, value, freeze(value), name, freeze, _never)
        self._held.append(held)
        self._rows[id(held), key] = row

    def add_values(self, held: Held, key: Any, name: str) -> None:
        """Add the values of a tensor, besides the tensor itself."""
        freeze = ContentFreezer()
        known = freeze(held.get(key, MISSING))
        self._held.append(held)
        self.add_test(lambda: bool(freeze(held.get(key, MISSING)) == known), name)

    def add_test(self, holds: Callable[[], bool], name: str) -> None:
        """Add another condition."""
        self._tests.append((holds, name))

    def add_member(self, kind: type, key: str) -> None:
        """Add an attribute of a class or of its bases."""
        owner = next((base for base in kind.__mro__ if key in vars(base)), None)
        if owner is None:
            return
        value, name = vars(owner)[key], f"{owner.__qualname__}.{key}"
        if isinstance(value, staticmethod):
            value = value.__func__
        try:
            is_plain = getattr(kind, key) is value
        except Exception:  # noqa: BLE001 - a descriptor of the user's
            is_plain = False
        if not is_plain:  # reading it makes a new object
            self.add(vars(owner), key, name)
            return
        if id(kind) not in self._views:
            self._views[id(kind)] = _Attributes(kind)
        self.add(self._views[id(kind)], key, name)

    def follow(self, space: Any) -> None:
        """Add the attributes of a class or module of the user's that forward reads."""
        if id(space) in self._followed or not is_users(space):
            return
        self._followed.add(id(space))
        self._held.append(space)
        if not isinstance(space, type):
            for key, value in list(vars(space).items()):
                if self._is_read(key, value):
                    self.add(vars(space), key, f"{space.__name__}.{key}")
            return
        self.follow(type(space))  # a metaclass has attributes for its classes
        for base in space.__mro__:
            if is_users(base):
                for key, value in list(vars(base).items()):
                    if self._is_read(key, value):
                        self.add_member(space, key)

    def _is_read(self, key: str, value: Any) -> bool:
        """Return whether forward may read or call an attribute of a class or module."""
        if self._is_called(value):
            return True
        if key[:2] == "__":
            return False
        if key in self._in_code:
            return True
        is_value = not isinstance(value, (*CODE, *DESCRIPTORS))
        return is_value and (self._names is None or key in self._names)

    def add_function(self, function: types.FunctionType) -> None:
        """Add a function's code, default values and attributes."""
        name = function.__qualname__
        for key in list(function.__dict__):
            if self._names is None or key in self._names:
                self.add(function.__dict__, key, f"{name}.{key}")
        self._frozen((function.__defaults__, function.__kwdefaults__), name)
        self._tests.append((_function_test(function, self._freeze), name))


def _function_test(function: types.FunctionType, freeze: Freezer) -> Any:
    """Return a test whether a function has its code, defaults and number of fields."""
    held = weakref.ref(function)
    code, values, named = (
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
    )
    size = len(function.__dict__)
    frozen = freeze((values, named))
    known = named and dict(named)
    every = (*(values or ()), *(named or {}).values())
    is_plain = all(
        isinstance(value, (*ATOMS, *CODE, types.FunctionType)) for value in every
    )

    def holds() -> bool:
        at = held()
        if at is None:
            return True
        if at.__code__ is not code or len(at.__dict__) != size:
            return False
        now, by_name = at.__defaults__, at.__kwdefaults__
        if is_plain and now is values and (by_name is None or by_name == known):
            return True
        return bool(freeze((now, by_name)) == frozen)

    return holds
