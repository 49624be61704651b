"""Search the places in which a model's code may keep tensors, see Note [Caches]."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from stretto.burst.tracing.caches import LEAVES, Holder, HolderList, LruCache
from stretto.burst.tracing.freezing import (
    MAX_ITEMS,
    attributes_in_slots,
    entries_of,
    is_users,
    may_read_users,
)
from stretto.burst.tracing.package_holders import (
    CONTAINERS,
    LEFT_OUT,
    PACKAGES,
    STANDARD,
    HolderTree,
    PackageHolders,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_LATE = MAX_ITEMS // 10
"""Limit of visits to objects of installed packages that files, not the model, hold.

They come last: a test runner or a logger leads to most objects of a program.
"""


@final
class Holders(HolderList):
    """Containers in which a model's code may keep tensors, with the present entries."""

    def __init__(
        self,
        root: nn.Module,
        twin_of: Callable[[Tensor], Tensor],
        packages: PackageHolders = PACKAGES,
    ) -> None:
        """Search.

        Args:
            root: The model.
            twin_of: Returns what replaces a held tensor in a recording.
            packages: What was found in packages before.
        """
        super().__init__(())
        self._twin_of = twin_of
        self._packages = packages
        packages.begin()
        self._trees: set[int] = set()
        self._found: dict[int, Holder] = {}
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[Any, str]] = deque()
        self._late: deque[tuple[Any, str]] | None = None
        self._left = MAX_ITEMS
        self._is_models = True
        self.num_visited = 0
        """Visits to objects that packages did not lead to before."""
        kinds = {
            kind
            for part in root.modules()
            for kind in type(part).__mro__
            if may_read_users(kind.__module__)
        }
        for name, part in root.named_modules():
            self._add_part(part, name)
        for kind in kinds:
            self._queue.append((kind, kind.__qualname__))
        self._search()
        self._late = deque()
        self._search_files({kind.__module__ for kind in kinds})
        self._queue, self._late = self._late, None
        self._left = min(self._left, _MAX_LATE)
        self._search()
        self._of_packages = packages.snapshot()

    def _search_files(self, of_model: set[str]) -> None:
        """Search the files of the model's classes, then the user's other files."""
        loaded: dict[str, Any] = dict(sys.modules)  # programs put other objects there
        files = {
            name: file
            for name, file in loaded.items()
            if isinstance(file, types.ModuleType)
            and (name in of_model or is_users(file))
        }
        # A large program may exceed the limit.
        for name in sorted(files, key=lambda name: name not in of_model):
            if name not in of_model:
                self._search(MAX_ITEMS // 2)
                self._is_models = False
            self._add(entries_of(files[name]), name, is_space=True)
        self._search()

    def _search(self, min_left: int = 0) -> None:
        """Visit what is queued, while more than ``min_left`` visits are left."""
        while self._queue and self._left > min_left:
            self._left -= 1
            with contextlib.suppress(Exception):  # of objects that pose as others
                self._visit(*self._queue.popleft())

    def __iter__(self) -> Iterator[Holder]:
        return chain(self._found.values(), self._of_packages)

    def differing(self) -> list[Holder]:
        """Return the holders whose entries may not be as they were."""
        own = [holder for holder in self._found.values() if holder.differs()]
        return own + self._of_packages.differing()

    def lru_caches(self) -> list[Holder]:
        """Return the holders that are an ``lru_cache``."""
        found = self._found.values()  # packages' ones are searched each time, too
        return [holder for holder in found if isinstance(holder.of, LruCache)]

    def _add_part(self, part: nn.Module, name: str) -> None:
        """Add what a module and its tensors may keep."""
        self._seen[id(part)] = part
        if not isinstance(part, nn.RNNBase):  # it lists its own parameters
            self._add(part.__dict__, name, is_space=True)
        buffers = Holder.now(part._buffers, name, is_space=True)  # noqa: SLF001
        own = self._found.get(id(part.__dict__))
        self._found.setdefault(id(buffers.of), replace(buffers, beside=own))
        for held in (part._parameters, part._buffers):  # noqa: SLF001
            for key, tensor in held.items():
                if tensor is not None:
                    path = f"{name}.{key}" if name else key
                    self._add(self._twin_of(tensor).__dict__, path, is_space=True)

    def _add(self, of: Any, name: str, *, is_space: bool = False) -> None:
        if id(of) in self._found:
            return
        self._found[id(of)] = holder = Holder.now(of, name, is_space=is_space)
        if len(holder.before) > MAX_ITEMS:
            return
        for key, value in holder.before.items():
            if isinstance(value, LEAVES) or (type(key) is str and key in LEFT_OUT):
                continue
            self._queue.append((value, holder.name_of(key)))

    def _visit(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, types.ModuleType):
            return
        if (
            tree := self._packages.tree_of(value, name, is_models=self._is_models)
        ) is not None:
            self._left += 1
            self._add_tree(tree)
            return
        self._seen[id(value)] = value
        self.num_visited += 1
        if isinstance(value, CONTAINERS):
            self._add(value, name)
            if isinstance(value, LruCache):
                self._queue.append((value.__wrapped__, name))
        elif isinstance(value, type):
            if may_read_users(value.__module__):
                self._add(value, name, is_space=True)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, name)
        elif (inner := parts_of(value)) is not None:
            self._queue.extend((part, name) for part in inner)
        elif isinstance(value, nn.Module):
            for path, part in value.named_modules(prefix=name):
                self._add_part(part, path)
        elif may_read_users(type(value).__module__) or isinstance(value, STANDARD):
            if self._late is not None and not _is_users_object(value):
                del self._seen[id(value)]
                self._late.append((value, name))
                return
            if isinstance(getattr(value, "__dict__", None), dict):
                self._add(value.__dict__, name, is_space=True)
            if next(iter(attributes_in_slots(value)), None) is not None:
                self._add(value, name, is_space=True)

    def _add_tree(self, tree: HolderTree) -> None:
        """Queue what must be searched each time from a package's class or function."""
        left = [tree]
        while left:
            one = left.pop()
            if id(one) in self._trees:
                continue
            self._trees.add(id(one))
            left += one.links.values()
            for of, name, is_space in chain.from_iterable(list(one.exits.values())):
                if is_space is None:
                    self._queue.append((of, name))
                else:
                    self._add(of, name, is_space=is_space)

    def _visit_function(self, function: types.FunctionType, name: str) -> None:
        if not may_read_users(function.__module__):
            return
        keys, cells = function.__code__.co_freevars, function.__closure__ or ()
        for key, cell in zip(keys, cells, strict=True):
            self._add(cell, f"{function.__qualname__}.{key}")
        for held in (function.__defaults__, function.__kwdefaults__):
            self._queue.append((held or (), name))
        self._add(function.__dict__, function.__qualname__, is_space=True)


def _is_users_object(value: Any) -> bool:
    return isinstance(value, STANDARD) or is_users(type(value))
