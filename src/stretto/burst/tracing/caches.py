"""Find and undo what a forward keeps outside of the call, such as a cache of tables.

# Note [Caches]
Forward may fill a cache on its first call: an attribute, a buffer that a state dict
does not hold, a container, a global or a ``functools.lru_cache``. Each recording begins
with the caches as the program left them and leaves them so: a tensor without values
must not stay in one. A recorded tensor that is kept must be the same for every call,
computed from constants and from buffers; see `call_history` for one that counts calls.
Layers then compute it in each step. Anything else that forward keeps belongs to one
call or to one state of the parameters, and is refused.

Caches are searched for in the attributes of modules, of their tensors and of what
these hold, in their classes and the files of these classes, and in all files of the
user's own. A context variable gets its earlier value, and plain values in these places
do too, under names that forward's code contains. Classes and functions of installed
packages are searched once per process, see `package_holders`. Where a capture fails
because of a tensor that was kept in another place, `forget` removes it from there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import operator
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stretto.burst.tracing.freezing import (
    ATOMS,
    MAX_ITEMS,
    attributes_in_slots,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_MISSING = object()
_SEQUENCES = (list, deque)
_CONTAINERS = (collections.OrderedDict, dict, set, *_SEQUENCES)
LruCache: Any = type(functools.lru_cache(lambda: None))
LEAVES = (*ATOMS, Tensor)

_MAX_INSIDE = 1000
"""Limit of values that are searched for tensors in one new entry."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Something whose entries code may replace, with its entries at some time."""

    of: Any
    """A container, class, file, variable of a closure, or an object with slots."""

    name: str

    before: dict[Any, Any]

    is_space: bool = False
    """Whether its keys are names in the code."""

    beside: Holder | None = None
    """The holder of a module's attributes, if this one is of its buffers."""

    @staticmethod
    def now(of: Any, name: str = "", *, is_space: bool = False) -> Holder:
        """Return a holder with its present entries."""
        return Holder(of, name, entries_in(of), is_space)

    def name_of(self, key: Any) -> str:
        """Return the name of an entry."""
        if not self.is_space:
            return self.name
        return f"{self.name}.{key}" if self.name else str(key)

    def differs(self) -> bool:
        """Return whether its entries may not be as they were."""
        if isinstance(self.of, LruCache):
            return True
        now = entries_in(self.of)
        return len(now) != len(self.before) or not all(
            map(operator.is_, now.values(), self.before.values())
        )

    def is_small_of(self, kind: Callable[[Any], bool]) -> bool:
        """Return whether it has few entries, all of one kind."""
        return len(self.before) <= MAX_ITEMS and all(map(kind, self.before.values()))

    def kept(self) -> dict[Any, list[Tensor]]:
        """Return the entries that got tensors without values, and these tensors."""
        if isinstance(self.of, LruCache):
            results = _results_in(self.of).items()
            inside = {key: tensors_in(value, FakeTensor) for key, value in results}
            return {key: tensors for key, tensors in inside.items() if tensors}
        kept: dict[Any, list[Tensor]] = {}
        for key, value in entries_in(self.of).items():
            if value is not self.before.get(key, _MISSING):
                found = tensors_in(value, FakeTensor)
                if found:
                    kept[key] = found
        return kept

    def restore(self, keys: Iterable[Any]) -> None:
        """Give entries their earlier values; in a container it is all entries."""
        if isinstance(self.of, LruCache):
            self.of.cache_clear()
        elif isinstance(self.of, _SEQUENCES):
            self.of.clear()
            self.of.extend(self.before.values())
        elif isinstance(self.of, set):
            self.of.clear()
            self.of.update(self.before.values())
        else:
            for key in keys:
                _put(self.of, key, self.before.get(key, _MISSING))

    def changed_beside(self) -> list[Any]:
        """Return changed entries such as the length for which a table was made."""
        now = entries_in(self.of)
        return [
            key
            for key in {**now, **self.before}
            if now.get(key, _MISSING) is not self.before.get(key, _MISSING)
            and _is_of_atoms(now.get(key))
            and _is_of_atoms(self.before.get(key))
        ]


def _is_of_atoms(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or some of these."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_of_atoms, value))
    return isinstance(value, ATOMS)


def entries_in(of: Any) -> dict[Any, Any]:
    """Return the entries of a holder, by key."""
    if isinstance(of, dict):  # a subclass may compute values when they are read
        return dict(dict.items(of))
    if isinstance(of, set):
        return {id(value): value for value in of}
    if isinstance(of, _SEQUENCES):
        return dict(enumerate(of))
    if isinstance(of, type):
        return dict(vars(of))
    if isinstance(of, types.CellType):
        with contextlib.suppress(ValueError):  # not set yet
            return {"": of.cell_contents}
        return {}
    return {} if isinstance(of, LruCache) else dict(attributes_in_slots(of))


def _results_in(cache: Any) -> dict[Any, Any]:
    """Return what an ``lru_cache`` holds, by keys made of the arguments."""
    parts, own = gc.get_referents(cache), vars(cache)
    held = [p for p in parts if type(p) is dict and p is not own]
    found = {}
    for key, value in (item for one in held for item in one.items()):
        if type(value).__name__ != "_lru_list_elem":
            found[key] = value
        else:  # its key and its result are among the cache's parts, one after another
            number = next((i for i, part in enumerate(parts) if part is key), None)
            found[key] = parts if number is None else parts[number + 1]
    return found


def _put(of: Any, key: Any, value: Any) -> None:
    """Set an entry, or delete it if its value was missing."""
    if isinstance(of, dict):
        if value is _MISSING:
            of.pop(key, None)
        else:
            of[key] = value
    elif isinstance(of, types.CellType):
        if value is _MISSING:
            del of.cell_contents
        else:
            of.cell_contents = value
    elif value is not _MISSING:
        setattr(of, key, value)
    elif hasattr(of, key):
        delattr(of, key)


def tensors_in(value: Any, kind: type[Tensor]) -> list[Tensor]:
    """Return the tensors of a class in a value: in containers and in objects."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    left = [value]
    while left and len(seen) < _MAX_INSIDE:
        at = left.pop()
        if isinstance(at, kind):
            found.append(at)
        if id(at) in seen or isinstance(at, _NOT_INSIDE):
            continue
        seen[id(at)] = at
        if isinstance(at, dict):
            left += [*dict.keys(at), *dict.values(at)]
        elif isinstance(at, (tuple, set, frozenset, *_SEQUENCES)):
            left += at
        elif type(at).__name__ == "_lru_list_elem":
            left += gc.get_referents(at)
        else:
            if isinstance(getattr(at, "__dict__", None), dict):
                left.append(at.__dict__)
            left += [inner for _, inner in attributes_in_slots(at)]
    return found


_NOT_INSIDE = (*LEAVES, nn.Module, types.ModuleType, type, types.BuiltinFunctionType)


class HolderList:
    """Holders, each with its entries at some time."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._holders = list(holders)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders)

    def differing(self) -> list[Holder]:
        """Return those whose entries may not be as they were."""
        return [holder for holder in self if holder.differs()]

    def lru_caches(self) -> list[Holder]:
        """Return those that are an ``lru_cache``."""
        return [holder for holder in self if isinstance(holder.of, LruCache)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor that forward keeps outside of the call."""

    tensor: Tensor

    holder: Holder

    key: Any


def kept_in(holders: HolderList) -> list[Kept]:
    """Return the tensors without values that holders got since they were found."""
    return [
        Kept(tensor, holder, key)
        for holder in holders.differing()
        for key, tensors in holder.kept().items()
        for tensor in tensors
    ]


def written_by_torch(part: nn.Module) -> set[str]:
    """Return the attributes that torch's own hooks write before each forward.

    Such as the weight of ``torch.nn.utils.spectral_norm`` and of pruning.
    """
    return {
        value
        for hook in part._forward_pre_hooks.values()  # noqa: SLF001
        if type(hook).__module__.startswith("torch.nn.utils.")
        for value in vars(hook).values()
        if isinstance(value, str)
    }


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """A holder with the entries in which forward keeps tensors, or plain values."""

    holder: Holder

    keys: tuple[Any, ...]

    recorded: dict[Any, Any]
    """The plain values that a recording left in it."""

    def filled(self) -> dict[Any, list[Tensor]] | None:
        """Return the entries that were filled; None if there are other changes."""
        found = {}
        now = entries_in(self.holder.of)
        for key in self.keys_now():
            value = now.get(key, _MISSING)
            if value is self.holder.before.get(key, _MISSING):
                continue
            found[key] = tensors_in(value, Tensor)
            if not found[key] and self.recorded.get(key, _MISSING) != value:
                return None
        return found

    def tensors(self) -> dict[Any, list[Tensor]]:
        """Return the tensors in filled entries, also of an ``lru_cache``."""
        if not isinstance(self.holder.of, LruCache):
            return self.filled() or {}
        results = _results_in(self.holder.of).items()
        return {key: tensors_in(value, Tensor) for key, value in results}

    def keys_now(self) -> list[Any]:
        """Return the keys of all entries that belong to the cache."""
        if self.holder.is_space:
            return list(self.keys)
        return list({**entries_in(self.holder.of), **self.holder.before})


def caches_of(kept: Iterable[Kept]) -> list[Cache]:
    """Return where tensors were kept."""
    keys: dict[Holder, dict[Any, None]] = {}
    for one in kept:
        keys.setdefault(one.holder, {})[one.key] = None
    for holder in list(keys):
        if holder.beside is not None:
            keys.setdefault(holder.beside, {})
    found = []
    for holder, some in keys.items():
        now, beside = entries_in(holder.of), holder.changed_beside()
        plain = {key: now[key] for key in beside if key in now}
        if some or beside:
            found.append(Cache(holder, (*some, *beside), plain))
    return found


def undo(holders: HolderList) -> None:
    """Restore what got tensors without values."""
    for cache in caches_of(kept_in(holders)):
        cache.holder.restore(cache.keys)


@contextlib.contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Undo forward's changes to attributes of modules, and to containers in them."""
    kept = [(part, dict(part.__dict__)) for part in module.modules()]
    contents: dict[int, tuple[Any, list[Any]]] = {}
    for _, attributes in kept:
        for value in attributes.values():
            if isinstance(value, _CONTAINERS):
                _keep_contents(value, contents)
    try:
        yield
    finally:
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for container, content in contents.values():
            _restore_contents(container, content)


def _keep_contents(value: Any, contents: dict[int, tuple[Any, list[Any]]]) -> None:
    """Copy the contents of a container, and of the containers in it."""
    if id(value) in contents:
        return
    contents[id(value)] = (value, _contents(value))
    for inner in list(value.values() if isinstance(value, dict) else value):
        if isinstance(inner, _CONTAINERS):
            _keep_contents(inner, contents)


def _contents(container: Any) -> list[Any]:
    """Return a container's items: a dictionary's keys and values in turn."""
    kind = _plain_kind(container)
    if issubclass(kind, dict):
        return [part for item in kind.items(container) for part in item]
    return list(kind.__iter__(container))


def _restore_contents(container: Any, content: Sequence[Any]) -> None:
    """Give a container its earlier items, if it has others.

    By the methods of the class that it is derived from: its own may refuse changes.
    """
    now = _contents(container)
    if len(now) == len(content) and all(map(operator.is_, now, content)):
        return
    kind = _plain_kind(container)
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(container, key, value)
    elif issubclass(kind, set):
        kind.update(container, content)
    else:
        kind.extend(container, content)


def _plain_kind(container: Any) -> Any:
    if type(container) in _CONTAINERS:
        return type(container)
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def forget(mode: Any) -> None:
    """Remove a recording's tensors without values from places that are not searched.

    Args:
        mode: The fake tensor mode of the recording.
    """
    fakes = {
        id(one): one
        for one in gc.get_objects()
        if type(one) is FakeTensor and one.fake_mode is mode
    }
    for one in fakes.values():
        for holder in gc.get_referrers(one):
            if isinstance(holder, dict) and holder is not fakes:
                for key in [key for key, value in holder.items() if value is one]:
                    del holder[key]
            elif type(holder).__name__ == "_lru_list_elem":
                for cache in gc.get_referrers(holder):
                    if isinstance(cache, LruCache):
                        cache.cache_clear()


@contextlib.contextmanager
def restored(caches: Iterable[Cache], *, emptied: bool = False) -> Iterator[None]:
    """Begin with caches as they were at capture, and restore them afterwards.

    Args:
        caches: With their entries at capture.
        emptied: Whether to leave out tensors in containers, such as tables for other
            numbers of samples.
    """
    now = [(cache, Holder.now(cache.holder.of)) for cache in caches]
    for cache, _ in now:
        cache.holder.restore(cache.keys_now())
        if emptied and not cache.holder.is_space:
            _without_tensors(cache.holder).restore(cache.keys_now())
    try:
        yield
    finally:
        for cache, later in now:
            later.restore(
                (*cache.keys_now(), *(() if cache.holder.is_space else later.before))
            )


def _without_tensors(holder: Holder) -> Holder:
    entries = holder.before.items()
    kept = {key: value for key, value in entries if not tensors_in(value, Tensor)}
    return Holder(holder.of, holder.name, kept)
