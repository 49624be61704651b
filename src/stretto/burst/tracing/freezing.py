"""Copies of plain state that can be compared with what it is later.

# Note [How far state is followed]
Containers and objects are followed to any depth, objects only through attributes whose
names the recorded functions contain: a model may hold its trainer, and through it all
of a program. Where the user's own functions make names while they run, as in
``getattr(options, f"rate_{i}")``, all attributes are followed. The user's classes and
modules are watched by their attributes, see `watching`, and a weak reference counts as
its object. A value of more than
`MAX_ITEMS` parts is compared by identity and length from there on, and an array of
more than `MAX_BYTES` by a sample of its elements.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import hashlib
import itertools
import logging
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from stretto.burst.memory import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

LRU_CACHE: Any = type(functools.lru_cache(lambda: None))

ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
)
"""Types whose values are compared as they are."""

MAX_ITEMS = 20_000
MAX_DEPTH = 50
_MAX_MADE, _LEVELS_MADE = 16, 4
"""Limits of the containers in the state of a known type, which are new each time."""

MAX_BYTES = 1 << 24
_MAX_KEPT = 1 << 12
"""Bytes of an array that are kept as they are; of longer ones a digest."""

_OPAQUE = (types.BuiltinFunctionType, enum.Enum)
SPACES = (type, types.ModuleType)
"""Hold values under names, and code."""
CODE = (*SPACES, types.BuiltinFunctionType)
"""Are compared by identity."""
DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
)
"""Are compared by identity; what they call is a function."""
_NOT_COMPARED = (*CODE, *DESCRIPTORS, types.FunctionType)
_WHOLE = frozenset(
    ("collections", "configparser", "weakref", "multiprocessing.sharedctypes")
)
"""Modules of the standard library whose objects keep the user's values under names of
their own."""
NOT_USERS = frozenset(("torch", "stretto", *sys.stdlib_module_names)) - {"__main__"}
"""Packages whose code reads no state of the user's; names of top-level modules."""

INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages."""

_MAPPINGS = (
    dict,
    types.MappingProxyType,
    type(os.environ),
    collections.UserDict,
)
_SEQUENCES = (list, tuple, collections.deque, collections.UserList)
_C: Any = ctypes.c_int.__mro__[-2]
"""The base of all objects of `ctypes`."""
_COUNTS = (itertools.count, itertools.repeat)
"""Iterators whose text contains their state."""


@final
class _Same:
    """Equal only to itself: an object that is compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


@final
class _Calls:
    """The calls of an ``lru_cache``, equal to fewer: it was not cleared since."""

    __slots__ = ("count",)

    def __init__(self, cache: Any) -> None:
        info = cache.cache_info()
        self.count = info.hits + info.misses

    def __eq__(self, before: object) -> bool:
        return isinstance(before, _Calls) and self.count >= before.count

    def __hash__(self) -> int:
        return 0


@final
class Freezer:
    """Makes copies of values that can be compared with later ones."""

    def __init__(
        self,
        names: Collection[str] | None,
        known: Collection[int],
        *,
        tensors: bool = True,
        contents: bool = False,
    ) -> None:
        """Prepare.

        Args:
            names: Attributes that are followed in objects; None follows all.
            known: The ids of modules that are watched otherwise.
            tensors: Whether tensors are compared by identity, or not at all.
            contents: Whether they are compared by what is in them, too, except
                those that are known.
        """
        self._names = names
        self._known = known
        self._tensors, self._contents = tensors, contents
        self.spaces: dict[int, Any] = {}
        """The classes of copied objects, and classes and modules among them, by id."""
        self.tensors: set[int] | None = None
        """Collects the ids of the tensors in copied values, unless it is None."""

    def __call__(self, value: Any) -> Any:
        """Return a copy of a value."""
        copy = _Freeze(
            self._names,
            self._known,
            self.meet,
            tensors=self._tensors,
            contents=self._contents,
        )
        copy.met = self.tensors
        return copy.of(value)

    def meet(self, space: Any) -> None:
        """Note a class or module."""
        self.spaces[id(space)] = space

    def is_by_identity(self, value: Any) -> bool:
        """Return whether a value equals itself, whatever is written into it."""
        if isinstance(value, Tensor) and not self._contents:
            return True
        return _is_by_identity(value, self._known)


@final
class ContentFreezer:
    """Makes copies of tensors' values, whichever tensors hold them."""

    def __call__(self, value: Any) -> Any:
        """Return a copy of a tensor's values."""
        if not isinstance(value, Tensor):
            return _Same(value)
        content = hashlib.blake2b(bytes_of(value.to_dense())).digest()
        return value.dtype, value.device, tuple(value.shape), content

    def is_by_identity(self, _value: Any) -> bool:
        """Return that no value equals itself whatever is written into it."""
        return False


@final
class _Freeze:
    """One copy in the making."""

    def __init__(
        self,
        names: Collection[str] | None,
        known: Collection[int],
        meet: Callable[[Any], None],
        *,
        tensors: bool,
        contents: bool,
    ) -> None:
        self._names = names
        self._known = known
        self._meet = meet
        self._tensors, self._contents = tensors, contents
        self._path: dict[int, int] = {}
        self._left = MAX_ITEMS
        self.met: set[int] | None = None

    def of(self, value: Any) -> Any:
        """Return the copy of a value."""
        if isinstance(value, ATOMS):
            return type(value), value
        if isinstance(value, Tensor):
            if self.met is not None:
                self.met.add(id(value))
            if self._contents and id(value) not in self._known:
                return _Same(value), _content_of(value)
            return _Same(value) if self._tensors else Tensor
        if isinstance(value, SPACES):
            self._meet(value)
            return _Same(value)
        if _is_by_identity(value, self._known):
            return _Same(value)
        if (depth := self._path.get(id(value))) is not None:
            return "again", depth
        self._left -= 1
        if self._left < 0 or len(self._path) > MAX_DEPTH:
            return _Same(value), len(value) if isinstance(value, Sized) else 0
        self._path[id(value)] = len(self._path)
        try:
            return type(value), self._parts(value)
        finally:
            del self._path[id(value)]

    def _parts(self, value: Any) -> Any:
        if isinstance(value, _Calls):
            return value
        if isinstance(value, weakref.ReferenceType):
            referent = value()  # must not be kept alive
            if self.met is not None and isinstance(referent, Tensor):
                self.met.add(id(referent))
            return None if referent is None else (id(referent), self._fields(referent))
        if type(value).__module__ != "builtins":
            self._meet(type(value))
        if type(value) is logging.Logger:  # its handlers and caches decide nothing
            return _Same(value) if self._is_near_limits() else self.of(_state_of(value))
        fields = self._fields(value)
        # Copied first: reading one value may add others.
        if isinstance(value, _MAPPINGS):
            items = list(value.items())
            return tuple((self.of(key), self.of(inner)) for key, inner in items), fields
        if isinstance(value, (set, frozenset)):
            return frozenset(self.of(inner) for inner in list(value)), fields
        if isinstance(value, _SEQUENCES):
            return tuple(self.of(inner) for inner in list(value)), fields
        if (found := _bytes_of(value)) is not None:
            return found
        if (state := _state_of(value)) is not None:
            return _Same(value) if self._is_near_limits() else self.of(state), fields
        if isinstance(value, nn.Module):
            held = (value._parameters, value._buffers, value._modules)  # noqa: SLF001
            return fields, tuple(self.of(part) for part in held)
        if isinstance(value, types.FunctionType):
            return _Same(value), fields, self.of(registry_of(value))
        if fields:
            return fields
        if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            return _Same(value)
        return _Same(value) if self._is_near_limits() else self._reduced(value)

    def _is_near_limits(self) -> bool:
        """Return whether a state made for this copy might be compared by identity."""
        return self._left < _MAX_MADE or len(self._path) > MAX_DEPTH - _LEVELS_MADE

    def _fields(self, value: Any) -> tuple[Any, ...]:
        """Return copies of an object's own attributes."""
        names = None if type(value).__module__ in _WHOLE else self._names
        found = [
            (key, self.of(inner))
            for key, inner in _attributes(value)
            if names is None or key in names
        ]
        return tuple(found)

    def _reduced(self, value: Any) -> Any:
        """Return what pickle would store of an object of a type written in C."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parts = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 - it can't be stored
            return _Same(value)
        if not isinstance(parts, tuple):
            return _Same(value)
        return tuple(self.of(part) for part in parts[1:3])


def registry_of(function: Any) -> Any:
    """Return the functions by type of a ``functools.singledispatch``, or None."""
    registry = getattr(function, "registry", None)
    return registry if isinstance(registry, types.MappingProxyType) else None


def variable_content(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    """Return the value of a context variable, or its default, in a tuple."""
    try:  # get(None) would leave out the default
        return (variable.get(),)
    except LookupError:
        return ()


def _content_of(tensor: Tensor) -> Any:
    """Return the values of a small tensor, and of any how often it was written."""
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return version
    if tensor.nbytes > _MAX_KEPT:
        return version
    return version, bytes(bytes_of(tensor))


def _is_by_identity(value: Any, known: Collection[int]) -> bool:
    return isinstance(value, (*_OPAQUE, *SPACES)) or id(value) in known


def may_read_users(name: object) -> bool:
    """Return whether functions of a module, by its name, may read the user's state."""
    # Asked at each attribute that forward reads; a program may set any object.
    return _is_users_name(name if type(name) is str else str(name or ""))


def is_users_frame(frame: types.FrameType | None, beyond: Collection[str] = ()) -> bool:
    """Return whether a frame is of the user's code.

    Args:
        frame: of a caller.
        beyond: modules whose functions only pass calls on, so that their caller counts.
    """
    while frame is not None and frame.f_globals.get("__name__") in beyond:
        frame = frame.f_back
    return frame is not None and may_read_users(frame.f_globals.get("__name__"))


@functools.lru_cache(maxsize=1 << 12)
def _is_users_name(name: str) -> bool:
    return name.partition(".")[0] not in NOT_USERS


def is_users(space: Any) -> bool:
    """Return whether a class or module is from the user's own code."""
    if isinstance(space, types.ModuleType):
        name = entries_of(space).get("__name__")
        return may_read_users(name) and _is_own_file(space)
    return _is_users_module(str(space.__module__))


def entries_of(module: types.ModuleType) -> dict[str, Any]:
    """Return a module's dictionary, without loading a module that loads lazily."""
    found: dict[str, Any] = types.ModuleType.__getattribute__(module, "__dict__")
    return found


@functools.lru_cache(maxsize=1 << 12)
def _is_users_module(name: str) -> bool:  # asked for every class in each forward
    return may_read_users(name) and _is_own_file(sys.modules.get(name))


def _is_own_file(module: Any) -> bool:
    if isinstance(module, types.ModuleType):
        file = entries_of(module).get("__file__")
    else:  # programs put other objects among the modules
        file = getattr(module, "__file__", None)
    return INSTALLED.isdisjoint(Path(file or "").parts)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object itself holds."""
    if isinstance(value, SPACES):  # by a weak reference
        kinds = value.__mro__ if isinstance(value, type) else (value,)
        for kind in kinds:
            if isinstance(kind, types.ModuleType) or is_users(kind):
                for key, inner in list(vars(kind).items()):
                    if key[:2] != "__" and not isinstance(inner, _NOT_COMPARED):
                        yield key, inner
        return
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from list(held.items())
    yield from attributes_in_slots(value)


def attributes_in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object holds in slots."""
    kind: Any = type(value)
    try:
        keys = _slots_of(kind)
    except TypeError:  # a class whose metaclass has no hash
        keys = _slots_of.__wrapped__(kind)
    for key in keys:
        if hasattr(value, key):
            yield key, getattr(value, key)


@functools.lru_cache(maxsize=1 << 12)
def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of a class's slots, as code names them."""
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key.startswith("__") and not key.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{key}")
            elif key != "__dict__":
                found.append(key)
    return tuple(found)


def _bytes_of(value: Any) -> Any:
    """Return the content of an array, or None."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (bytearray, array.array, _C)):
        return bytes(value)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.hasobject:
        return None
    if value.nbytes > MAX_BYTES:
        step = -(-value.nbytes // MAX_BYTES)
        return _Same(value), np.asarray(value.flat[::step]).tobytes()
    content = value.tobytes()
    if len(content) > _MAX_KEPT:
        content = hashlib.blake2b(content).digest()
    return value.dtype.str, value.shape, content


def _state_of(value: Any) -> Any:
    """Return a value that holds all state of a known type, or None."""
    if isinstance(value, np.ndarray):  # of objects
        return value.tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, logging.Logger):
        level = value.getEffectiveLevel()
        return level, value.disabled, value.manager.disable
    if isinstance(value, LRU_CACHE):
        return value.__wrapped__, _Calls(value)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, contextvars.ContextVar):
        return variable_content(value)
    if isinstance(value, _COUNTS):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return (-1,) if frame is None else (frame.f_lasti, frame.f_locals)
    return None
