"""Search installed packages for holders, once per process.

A holder is an object in which code can keep a value after a call, such as a module's
dictionary, a class, a list or a variable of a closure. Called by
`stretto.burst.tracing.cache_search`.

A program that imports a large package leads to thousands of its classes. They are
searched at the first capture. Later ones compare the entries found then with those
present, all in one pass without a loop in Python, and search only what changed.

A holder is kept if all its entries are classes, functions, constants or containers of
these. Others, such as a dictionary of tensors, are searched each time and not kept: a
program that drops a tensor gets its memory back.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import functools
import operator
import queue
import threading
import types
import weakref
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor, nn

from stretto.burst.tracing.caches import Holder, LruCache
from stretto.burst.tracing.freezing import (
    ATOMS,
    MAX_ITEMS,
    is_users,
    may_read_users,
    variable_content,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CONTAINERS = (dict, set, list, deque, LruCache)
STANDARD = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    queue.Queue,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
"""Classes of the standard library whose objects may hold the user's values."""

_OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Attributes of modules whose tensors are replaced while a forward is recorded."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of modules with hooks: what these keep is not forward's."""

LEFT_OUT = frozenset((*_OF_MODULES, *_HOOKS))

_VALUES: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    collections.OrderedDict: dict.values,
    collections.defaultdict: dict.values,
    set: set.__iter__,
    list: list.__iter__,
    deque: deque.__iter__,
    type: lambda kind: vars(kind).values(),
    types.CellType: lambda cell: (cell.cell_contents,),
}
"""How to read the entries of each type of holder that is compared in one pass."""

_NOTHING = (
    *ATOMS,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_PASSED = (
    *(tuple, frozenset, classmethod, staticmethod, property),
    functools.cached_property,
)
"""Types whose values have no entries of their own, but fixed parts."""

_MAX_OF_FILES = MAX_ITEMS // 2
"""Limit of what is kept of packages that files name, not the model."""

Exit = tuple[Any, str, bool | None]
"""A holder with its name and whether it is a space; or a value, with None."""


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """Return what a value that has no entries of its own refers to, or None."""
    if isinstance(value, (tuple, frozenset)):
        return tuple(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (classmethod, staticmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, contextvars.ContextVar):
        return variable_content(value)
    return None


def _is_of_package(value: Any) -> bool:
    """Return whether a value is a class or function of an installed package."""
    return (
        isinstance(value, (type, types.FunctionType))
        and may_read_users(value.__module__)
        and not is_users(value)
    )


def _leads_nowhere(value: Any) -> bool:
    """Return whether a value holds nothing of the user's, and no memory to speak of."""
    if isinstance(value, _NOTHING):
        return True
    if isinstance(value, (type, types.FunctionType)):
        return not may_read_users(value.__module__)
    if isinstance(value, (*_PASSED, *CONTAINERS, *STANDARD, Tensor, nn.Module)):
        return False
    if parts_of(value) is not None:
        return False
    name = type(value).__module__
    return not may_read_users(name) and name.partition(".")[0] != "torch"


def _is_fixed(value: Any) -> bool:
    """Return whether a value can be searched once: others are searched each time."""
    return (
        _is_of_package(value)
        or type(value) in _VALUES
        or (isinstance(value, _PASSED) and all(map(_may_stay, parts_of(value) or ())))
    )


def _may_stay(value: Any) -> bool:
    return _leads_nowhere(value) or _is_fixed(value)


@final
class HolderTree:
    """Holders that were found from one class or function."""

    __slots__ = ("exits", "links")

    def __init__(self) -> None:
        self.exits: dict[int, list[Exit]] = {}
        """Objects to search each time, by the id of the holder that leads there."""
        self.links: dict[int, HolderTree] = {}


class _Group(NamedTuple):
    """Holders of one type, with all their entries."""

    holders: list[Holder]

    held: list[Any]

    sizes: list[int]

    values: list[Any]

    @staticmethod
    def of(kind: type, holders: list[Holder]) -> tuple[Callable[..., Any], _Group]:
        """Return how to read holders of a type, and these with their entries."""
        values = list(chain.from_iterable(h.before.values() for h in holders))
        held, sizes = [h.of for h in holders], [len(h.before) for h in holders]
        return _VALUES[kind], _Group(holders, held, sizes, values)

    def is_same(self, read: Callable[[Any], Iterable[Any]]) -> bool:
        """Return whether all entries are as they were."""
        held: Iterable[Any] = self.held
        if read is _VALUES[types.CellType]:
            now = list(map(operator.attrgetter("cell_contents"), held))
        else:
            if read is _VALUES[type]:
                held = list(map(vars, self.held))
                read = types.MappingProxyType.values
            if list(map(len, held)) != self.sizes:
                return False
            now = list(chain.from_iterable(map(read, held)))
        return len(now) == len(self.values) and all(map(operator.is_, now, self.values))


@final
class Snapshot:
    """Holders with the entries that they had at some time."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        kinds: dict[type, list[Holder]] = {}
        for holder in holders:
            kind = type if isinstance(holder.of, type) else type(holder.of)
            kinds.setdefault(kind, []).append(holder)
        self._groups = [_Group.of(kind, some) for kind, some in kinds.items()]

    def __iter__(self) -> Iterator[Holder]:
        return chain.from_iterable(group.holders for _, group in self._groups)

    def differing(self) -> list[Holder]:
        """Return the holders whose entries are not as they were."""
        found: list[Holder] = []
        for read, group in self._groups:
            with contextlib.suppress(Exception):  # another thread may change them
                if group.is_same(read):
                    continue
            found += [holder for holder in group.holders if holder.differs()]
        return found


@final
class PackageHolders:
    """The holders of packages that were found in this process."""

    def __init__(self) -> None:
        self._trees: dict[int, HolderTree] = {}
        self._kept: list[Any] = []
        """Objects that have a tree, so that their ids stay their own."""
        self._holders: dict[int, tuple[Holder, HolderTree]] = {}
        self._snapshot: Snapshot | None = Snapshot(())
        self._limit = MAX_ITEMS
        self.num_visited = 0
        """Visits to objects so far."""

    def begin(self) -> None:
        """Leave to later searches what changed since the last one."""
        for holder in self.snapshot().differing():
            _, tree = self._holders.pop(id(holder.of))
            tree.exits[id(holder.of)] = [(holder.of, holder.name, holder.is_space)]
            self._snapshot = None

    def snapshot(self) -> Snapshot:
        """Return all holders, with their entries when they were found."""
        if self._snapshot is None:
            self._snapshot = Snapshot(holder for holder, _ in self._holders.values())
        return self._snapshot

    def tree_of(self, value: Any, name: str, *, is_models: bool) -> HolderTree | None:
        """Return what is found from a class or function; None for other values.

        Args:
            value: The class or function.
            name: A path to it.
            is_models: Whether the model or the file of one of its classes leads there.
                What only other files name is left out beyond a limit.
        """
        if (known := self._trees.get(id(value))) is not None:
            return known
        if (
            not _is_of_package(value)
            or "<locals>" in value.__qualname__  # each call may make another one
        ):
            return None
        self._limit = MAX_ITEMS if is_models else _MAX_OF_FILES
        if not self._has_room():
            return None if is_models else HolderTree()
        return self._search(value, name)

    def _has_room(self) -> bool:
        return len(self._kept) < self._limit

    def _search(self, root: Any, name: str) -> HolderTree:
        tree = HolderTree()
        left: deque[tuple[Any, str, int]] = deque([(root, name, id(root))])
        while left:
            value, name, above = left.popleft()
            if (known := self._trees.get(id(value))) is not None:
                if known is not tree:
                    tree.links[id(known)] = known
                continue
            with contextlib.suppress(Exception):  # of objects that pose as others
                if _leads_nowhere(value):
                    continue
                self.num_visited += 1
                is_done = (
                    _is_fixed(value)
                    and (value is root or self._has_room())
                    and self._visit(tree, value, name, above, left)
                )
                if not is_done:
                    tree.exits.setdefault(above, []).append((value, name, None))
        return tree

    def _visit(
        self,
        tree: HolderTree,
        value: Any,
        name: str,
        above: int,
        left: deque[tuple[Any, str, int]],
    ) -> bool:
        """Add what a value holds; return whether it need not be searched again."""
        if isinstance(value, _PASSED):
            left += [(part, name, above) for part in parts_of(value) or ()]
        elif isinstance(value, types.FunctionType):
            self._keep(tree, value)
            self._add_function(tree, value, name, left)
        elif isinstance(value, type):
            self._keep(tree, value)
            self._add(tree, value, value.__qualname__, left, is_space=True)
        else:
            if not (holder := Holder.now(value, name)).is_small_of(_may_stay):
                return False
            self._keep(tree, value)
            self._add(tree, value, name, left, holder=holder)
        return True

    def _keep(self, tree: HolderTree, value: Any) -> None:
        self._trees[id(value)] = tree
        self._kept.append(value)

    def _add_function(
        self,
        tree: HolderTree,
        function: types.FunctionType,
        name: str,
        left: deque[tuple[Any, str, int]],
    ) -> None:
        path = function.__qualname__
        keys, cells = function.__code__.co_freevars, function.__closure__ or ()
        for key, cell in zip(keys, cells, strict=True):
            self._add(tree, cell, f"{path}.{key}", left)
        defaults = (function.__defaults__, function.__kwdefaults__)
        left += [(held, name, id(function)) for held in defaults if held]
        self._add(tree, function.__dict__, path, left, is_space=True)

    def _add(
        self,
        tree: HolderTree,
        of: Any,
        name: str,
        left: deque[tuple[Any, str, int]],
        *,
        is_space: bool = False,
        holder: Holder | None = None,
    ) -> None:
        """Add a holder; one with other values is left to each search."""
        if id(of) in self._holders:
            return
        holder = holder or Holder.now(of, name, is_space=is_space)
        if not holder.is_small_of(_may_stay):
            tree.exits.setdefault(id(of), []).append((of, name, is_space))
            return
        self._holders[id(of)] = holder, tree
        self._snapshot = None
        left += [
            (value, holder.name_of(key), id(of))
            for key, value in holder.before.items()
            if not (type(key) is str and key in LEFT_OUT)
        ]


PACKAGES = PackageHolders()
"""Holders found by all captures of this process, whatever the model."""
