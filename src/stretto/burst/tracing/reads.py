"""Record the plain state that forward reads, to detect a change of it.

# Note [A capture is valid while what it read is unchanged]
A recorded forward holds the outcome of every decision that Python made in it. Such a
decision depends on the values that the code read: attributes of modules (a mode, a
schedule's counter, a configuration's flag), plain globals, and the modes around the
call. Each attribute that is read of a module while a forward is recorded is noted; a
capture can be used again as long as all of them have the values that they had.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import gc
import inspect
import itertools
import logging
import operator
import os
import sys
import textwrap
import types
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from stretto.burst.hooks import HOOKS, HOOKS_OF_ALL
from stretto.burst.tracing.around import state_of
from stretto.burst.tracing.freezing import (
    INSTALLED,
    LRU_CACHE,
    SPACES,
    may_read_users,
)
from stretto.burst.tracing.freezing import is_users as is_own
from stretto.burst.tracing.replaced import REPLACED_FUNCTIONS
from stretto.burst.tracing.torch_modules import BatchNorm, Dropout, InstanceNorm
from stretto.burst.tracing.watching import MISSING, Cell, Watch, WatchedRows
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    _Helper = tuple[types.CodeType, dict[str, Any]]
    """A function's code and globals."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_REPLACED = (Dropout, BatchNorm, InstanceNorm)
"""Torch's modules of which the executor replaces the forward."""
_own_forward = operator.methodcaller("get", "forward")
_OF_LAYERS = ("training", "p", "dropout")
"""Attributes that change the meaning of torch's own modules, which run as they are."""


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Leave `torch.inference_mode`, with the grad mode unchanged.

    For values that are computed once and used by later forwards and backwards, which
    inference tensors do not allow.
    """
    grad = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        yield


@contextlib.contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Compute parametrized tensors at each use, in ``parametrize.cached()`` too.

    Its cache would keep tensors without values, or of perturbed parameters, for the
    program's later forwards, and the graph of a layer's backward that has ended.
    """
    held: Any = parametrize
    kept, held._cache_enabled = held._cache_enabled, 0  # noqa: SLF001
    try:
        yield
    finally:
        held._cache_enabled = kept  # noqa: SLF001


@final
@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes around a call of the model."""

    grad: bool = True

    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def now(device: torch.device) -> Ambient:
        """Return the modes that are set."""
        kinds = dict.fromkeys(("cpu", device.type))
        return Ambient(
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            ),
        )

    @contextlib.contextmanager
    def set(self, device: torch.device) -> Iterator[None]:
        """Set these modes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(normal_tensors())
            stack.enter_context(uncached_parametrizations())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            on = dict(self.autocast)
            for kind in dict.fromkeys(("cpu", device.type)):
                if kind in on:
                    mode = torch.autocast(kind, dtype=on[kind])
                elif torch.is_autocast_enabled(kind):
                    mode = torch.autocast(kind, enabled=False)
                else:
                    continue
                stack.enter_context(mode)
            yield


@final
class Reads:
    """Records which attributes of a model's modules are read."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules = {id(part): (name, part) for name, part in root.named_modules()}
        self._found: dict[tuple[int, str], bool] = {}
        """Attributes that are read; whether by code other than torch's."""
        self._codes: dict[int, types.CodeType] = {}
        self._helpers: list[_Helper] = []
        self._cached: list[_Helper] = []
        """Functions behind an ``lru_cache``, which may answer without a call."""
        self._functions: list[types.FunctionType] = []
        self._seeds: dict[int, set[int]] = {}
        """By the id of a function's code: the lines that name a generator's seed."""
        self._seed_read = ""
        self._searched = 0
        self._is_on = False
        self.objects: list[Any] = []
        """Modes around forward, which have attributes."""
        self.decided: dict[int, Tensor] = {}
        """Tensors by whose values forward decides, by id, see `constant_values`."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record each attribute that is read meanwhile."""
        found, known = self._found, self._modules
        read = object.__getattribute__

        def note(module: nn.Module, name: str) -> Any:
            number = id(module)
            if number not in known or name in _INTERNAL:
                if name in HOOKS and number in known:
                    caller = sys._getframe(1)  # noqa: SLF001
                    if may_read_users(caller.f_globals.get("__name__")):
                        found[number, name] = True
                return read(module, name)
            is_public = name[:2] != "__"
            if is_public and found.get((number, name)):
                return read(module, name)  # already recorded as the user's
            if is_public or name == "__dict__":  # not __class__ of isinstance()
                caller = sys._getframe(1)  # noqa: SLF001 - also of getattr() and vars()
                is_users = may_read_users(caller.f_globals.get("__name__"))
                if is_public:
                    found[number, name] = is_users
                elif is_users:
                    found.update(((number, key), True) for key in vars_of(module))
            return read(module, name)

        def vars_of(module: nn.Module) -> list[str]:
            return [k for k in read(module, "__dict__") if k not in _INTERNAL]

        kind: Any = nn.Module
        kind.__getattribute__ = note
        # Callbacks of the garbage collector are not part of forward.
        collects = gc.isenabled()
        gc.disable()
        before = sys.gettrace()
        # Unlike a profile function it is called only for Python functions.
        self._is_on = True
        sys.settrace(self._called)
        try:
            yield
        finally:
            self._is_on = False
            sys.settrace(before)
            if collects:
                gc.enable()
            del kind.__getattribute__

    def _called(self, frame: types.FrameType, _event: str, _arg: Any) -> Any:
        """Record a function of the user's that forward calls, see `_add_helper`.

        It returns None so that the function's lines are not traced, unless one of them
        names a generator's seed.
        """
        if not self._is_on:  # in a thread of autograd
            sys.settrace(None)
            return None
        code = frame.f_code
        if id(code) not in self._codes:  # equal code may be another function's
            self._codes[id(code)] = code
            if may_read_users(frame.f_globals.get("__name__")):
                self._helpers.append((code, frame.f_globals))
                if _SEED in (*code.co_names, *code.co_consts):
                    self._seeds[id(code)] = _lines_with(code, _SEED)
        return self._line_reached if id(code) in self._seeds else None

    def _line_reached(self, frame: types.FrameType, _event: str, _arg: Any) -> Any:
        """Note that a line runs which reads a generator's seed."""
        if frame.f_lineno in self._seeds[id(frame.f_code)]:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._seed_read = self._seed_read or place
        return self._line_reached

    def refuse_seed(self) -> None:
        """Refuse code that asked a generator for its seed.

        Raises:
            SpecError: it did; the message names the line.
        """
        if self._seed_read:
            raise SpecError(
                f"{self._seed_read}: reads initial_seed() of a generator in the model: "
                "layers run on other ranks, with seeds of their own. Read it outside "
                "of the model, and pass what is made of it as an attribute"
            )

    def names(self) -> set[str] | None:
        """Return the names that the user's functions contain.

        None if they make names while they run.
        """
        return _names(self._helpers + self._cached)

    def names_in_code(self) -> set[str] | None:
        """Return `names` and those of functions, and of variables they close over."""
        if (names := self.names()) is None:
            return None
        codes = [code for code, _ in self._helpers + self._cached]
        return names.union(*((code.co_name, *code.co_freevars) for code in codes))

    def watch(self, *, is_between: bool = True, trained: bool = False) -> Watch:
        """Return all values as they are now.

        They are for a comparison between steps, or else with what one forward changes:
        then tensors and the state of installed packages do not count. ``trained``:
        whether they include which parameters need a gradient.
        """
        helpers, rows = self._rows(self._modules.keys(), tensors=is_between)
        for (number, key), is_users in self._found.items():
            self._add_read(rows, number, key, is_users=is_users)
        self._add_module_hooks(rows)
        if is_between:
            _add_hooks(rows, HOOKS_OF_ALL, "a hook of all modules")
            self._add_objects_in_hooks(rows)
            self._add_values(rows)
        self._add_globals(rows)
        self._add_functions(rows, helpers, is_between=is_between)
        self._add_tests(rows, trained=trained)
        _add_flags(rows, {name for code, _ in helpers for name in code.co_names})
        self._add_forwards(rows)
        return rows.watch()

    def watch_of_layers(self, *, trained: bool) -> Watch:
        """Return what layers read or replace, and not what forward's own code reads.

        For a forward whose code runs again before each step. No layer may run code of
        the user's.
        """
        _, rows = self._rows(self._modules.keys(), tensors=True)
        for (number, key), is_users in self._found.items():
            part = self._modules[number][1]
            if _is_layer(part) or isinstance(part, _REPLACED) or key in part._buffers:  # noqa: SLF001
                self._add_read(rows, number, key, is_users=is_users)
        self._add_module_hooks(rows)
        _add_hooks(rows, HOOKS_OF_ALL, "a hook of all modules")
        self._add_values(rows)
        self._add_tests(rows, trained=trained)
        self._add_forwards(rows)
        return rows.watch()

    def _add_module_hooks(self, rows: WatchedRows) -> None:
        """Add the hooks of the user's modules, and backward hooks of the model."""
        for prefix, part in self._modules.values():
            for key in HOOKS[2:] if part is self._root else HOOKS:
                if part is self._root or not _is_layer(part):
                    rows.add(
                        vars(part),
                        key,
                        f"the hooks of {prefix!r}"
                        if prefix
                        else "the hooks of the model",
                    )

    def watch_of_backward(self, *, in_check: bool = False) -> Watch:
        """Return what was read while hooks or a backward ran, as it is now.

        It includes the contents of tensors, except of the module's own ones with
        gradients: a check computes with other values in these. ``in_check``: whether it
        is compared within a check, which also replaces the module's other buffers by
        copies.
        """
        owned = (*self._root.parameters(), *self._root.buffers())
        known = {id(x) for x in owned if x.is_floating_point() or x.is_complex()}
        helpers, rows = self._rows(
            known | self._modules.keys(), tensors=True, contents=True
        )
        for (number, key), is_users in self._found.items():
            part = self._modules[number][1]
            buffer = part._buffers.get(key)  # noqa: SLF001
            if is_users and in_check and buffer is not None:
                if id(buffer) not in known:
                    rows.add_content(part._buffers, key, self._name_of(number, key))  # noqa: SLF001
            elif is_users:
                self._add_read(rows, number, key, is_users=True)
        for prefix, part in self._modules.values():
            held = {kind: vars(part)[kind] for kind in HOOKS[2:]}
            _add_hooks(rows, held, f"a hook of {prefix!r}")
        _add_hooks(rows, HOOKS_OF_ALL, "a hook of all modules")
        for one in self.objects:
            for key in state_of(one):
                rows.add(vars(one), key, f"{type(one).__name__}.{key}")
            rows.follow(type(one))
        self._add_functions(rows, helpers, is_between=True)
        return rows.watch()

    def _rows(
        self, known: Collection[int], *, tensors: bool, contents: bool = False
    ) -> tuple[list[_Helper], WatchedRows]:
        self._find_functions()
        helpers = self._helpers + self._cached
        rows = WatchedRows(
            _names(helpers),
            {name for code, _ in helpers for name in code.co_names},
            known,
            self._is_called,
            tensors=tensors,
            contents=contents,
        )
        return helpers, rows

    def _add_functions(
        self, rows: WatchedRows, helpers: list[_Helper], *, is_between: bool
    ) -> None:
        """Add what functions read, besides attributes of modules."""
        for code, held in helpers:
            is_users = INSTALLED.isdisjoint(_folders(code))
            if is_users or is_between:
                _add_helper(rows, code, held, self._is_called, is_users=is_users)
        for function in self._functions:
            code = function.__code__
            if is_between or INSTALLED.isdisjoint(_folders(code)):
                _add_function(rows, function)

    def num_functions(self) -> int:
        """Return how many functions of the user's were called so far."""
        return len(self._helpers)

    def line_deciding_by(self, name: Any, first: int = 0) -> str:
        """Return the line of a function that may return something by a value, if any.

        Those before the ``first`` that was called don't count.

        One that names it can't if all that it returns is None, or if it only appends
        to the value.
        """
        for code, _ in self._helpers[first:]:
            is_named = not isinstance(name, str) or (  # else a hook's own state
                name in (*code.co_names, *code.co_freevars)
                and not _only_appends(code, name)
            )
            if is_named and may_return(code):
                return f"{code.co_filename}:{code.co_firstlineno}"
        return ""

    def trace_thread(self) -> None:
        """Record functions that another thread calls, until `noted` ends."""
        if self._is_on:
            sys.settrace(self._called)

    def _add_read(
        self, rows: WatchedRows, number: int, key: str, *, is_users: bool
    ) -> None:
        """Add an attribute that was read of a module, by the user's code or torch's."""
        part, name = self._modules[number][1], self._name_of(number, key)
        if _is_layer(part) and not is_users and key not in _OF_LAYERS:
            return
        if key in part._parameters or key in part._modules:  # noqa: SLF001
            return  # see `Structure`
        if key in part._buffers:  # noqa: SLF001
            if is_users or not _is_layer(part):
                rows.add(part._buffers, key, name)  # noqa: SLF001
            return
        rows.add(vars(part), key, name)
        if key not in vars(part):
            rows.add_member(type(part), key)

    def _name_of(self, number: int, key: str) -> str:
        prefix, _ = self._modules[number]
        return f"{prefix}.{key}" if prefix else key

    def _add_tests(self, rows: WatchedRows, *, trained: bool) -> None:
        """Add the modules' classes and what is not a value under a name."""
        parts = [part for _, part in self._modules.values()]
        kinds = [type(part) for part in parts]
        rows.add_test(lambda: list(map(type, parts)) == kinds, "the class of a module")
        held = [
            one
            for part in parts
            for one in (part._modules, part._parameters, part._buffers)  # noqa: SLF001
        ]
        sizes = list(map(len, held))
        rows.add_test(
            lambda: list(map(len, held)) == sizes,
            "the number of a module's parts, parameters or buffers",
        )
        dtype = torch.get_default_dtype()
        rows.add_test(
            lambda: torch.get_default_dtype() is dtype, "torch.get_default_dtype()"
        )
        if trained:
            parameters = list(self._root.parameters())
            known = [p.requires_grad for p in parameters]

            def is_same() -> bool:
                with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                    return [p.requires_grad for p in parameters] == known

            rows.add_test(is_same, "requires_grad")

    def _add_values(self, rows: WatchedRows) -> None:
        """Add the values of tensors by which forward decides."""
        left = dict(self.decided)
        for number, (_, part) in self._modules.items():
            for held in (part._parameters, part._buffers):  # noqa: SLF001
                for key, tensor in held.items():
                    if id(tensor) in self.decided:
                        rows.add_values(held, key, self._name_of(number, key))
                        left.pop(id(tensor), None)
        for tensor in left.values():
            name = f"a tensor of shape {tuple(tensor.shape)}"
            rows.add_values({"": tensor}, "", name)

    def _add_forwards(self, rows: WatchedRows) -> None:
        """Add the forwards that the executor replaces, if the program replaces them."""
        parts = [p for _, p in self._modules.values() if isinstance(p, _REPLACED)]
        held = [vars(part) for part in parts]
        own = list(map(_own_forward, held))
        if held:
            rows.add_test(
                lambda: list(map(_own_forward, held)) == own, "the forward of a module"
            )
        for kind in set(map(type, parts)):
            rows.add_member(kind, "forward")
        for key in REPLACED_FUNCTIONS if parts else ():
            rows.add(vars(functional), key, f"torch.nn.functional.{key}")

    def _add_objects_in_hooks(self, rows: WatchedRows) -> None:
        """Add hooks of layers that are objects, of which other state is read."""
        for prefix, part in self._modules.values():
            for kind in HOOKS[:2] if _is_layer(part) else ():
                for number, hook in vars(part)[kind].items():
                    if not isinstance(hook, types.FunctionType):
                        rows.add(vars(part)[kind], number, f"a hook of {prefix!r}")

    def _add_globals(self, rows: WatchedRows) -> None:
        """Add plain globals that the modules' own functions name."""
        kinds = {
            kind
            for _, part in self._modules.values()
            for kind in type(part).__mro__
            if not kind.__module__.startswith("torch.")
        }
        for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
            for method, function in list(vars(kind).items()):
                if not isinstance(function, types.FunctionType):
                    continue
                if self._is_called(function):
                    rows.add(vars(kind), method, f"{kind.__qualname__}.{method}")
                held = function.__globals__
                for key in _globals_of(function.__code__):
                    if isinstance(held.get(key), (bool, int, float, str)):
                        rows.add(held, key, f"{function.__module__}.{key}")

    def _find_functions(self) -> None:
        """Find the functions that have the code that forward called.

        Code does not refer to its function, so this visits every object of the process.
        Functions behind an ``lru_cache`` may have been called earlier.
        """
        if self._searched == len(self._helpers):
            return
        self._searched = len(self._helpers)
        called = {id(code) for code, _ in self._helpers}
        names = {name for code, _ in self._helpers for name in code.co_names}
        # Without a loop in Python, which would take a tenth of a second.
        objects = gc.get_objects()
        kinds = list(map(type, objects))
        functions = list(_of_kind(types.FunctionType, objects, kinds))
        codes = map(id, map(operator.attrgetter("__code__"), functions))
        self._functions = list(
            itertools.compress(functions, map(called.__contains__, codes))
        )
        self._cached = []
        for one in _of_kind(LRU_CACHE, objects, kinds):
            inner = inspect.unwrap(one)
            if (
                isinstance(inner, types.FunctionType)
                and inner.__name__ in names
                and id(inner.__code__) not in self._codes
                and may_read_users(inner.__module__)
            ):
                self._functions.append(inner)
                self._cached.append((inner.__code__, inner.__globals__))

    def _is_called(self, value: Any) -> bool:
        """Return whether it is a function, or a method, that forward calls."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        return isinstance(value, types.FunctionType) and (
            id(value.__code__) in self._codes
        )


def _add_hooks(rows: WatchedRows, held: dict[str, dict[int, Any]], name: str) -> None:
    for hooks in held.values():
        for number in hooks:
            rows.add(hooks, number, name)


def _add_flags(rows: WatchedRows, names: Collection[str]) -> None:
    """Add settings of PyTorch that functions called by forward name."""
    for name in sorted(_FLAGS.keys() & names):
        now = _FLAGS[name]
        rows.add_test(partial(_is_now, now, now()), name)


def _is_now(now: Callable[[], Any], known: Any) -> bool:
    return bool(now() == known)


def _backend_flags(name: str) -> Callable[[], list[Any]]:
    backends = [
        getattr(torch.backends, key) for key in ("cudnn", "mkldnn", "cuda", "mkl")
    ]
    held = [getattr(one, "matmul", one) for one in backends]
    return lambda: [getattr(one, name, None) for one in held]


_FLAGS: dict[str, Callable[[], Any]] = {
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
    "get_default_device": torch.get_default_device,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
    "allow_tf32": _backend_flags("allow_tf32"),
    "benchmark": _backend_flags("benchmark"),
    "deterministic": _backend_flags("deterministic"),
}
"""Settings of PyTorch by the names under which code reads them."""


def _of_kind(kind: type, objects: list[Any], kinds: list[type]) -> Iterator[Any]:
    return itertools.compress(objects, map(operator.is_, kinds, itertools.repeat(kind)))


def _names(helpers: list[tuple[types.CodeType, dict[str, Any]]]) -> set[str] | None:
    """Return the names that functions called by forward contain.

    None if functions of the user's make names while they run.
    """
    if any(
        INSTALLED.isdisjoint(_folders(code)) and _makes_names(code)
        for code, _ in helpers
    ):
        return None
    names: set[str] = set()
    for code, _ in helpers:
        names.update(code.co_names)
        names.update(c for c in code.co_consts if isinstance(c, str))
    return names


def _add_helper(
    rows: WatchedRows,
    code: types.CodeType,
    held: dict[str, Any],
    is_called: Callable[[Any], bool],
    *,
    is_users: bool,
) -> None:
    """Add globals that a function uses, and attributes of classes and modules in them.

    Of installed packages only numbers, texts and functions that forward calls, also of
    classes and modules that they name.
    """
    if not _READ_ENVIRONMENT.isdisjoint(code.co_names):
        rows.add(vars(os), "environ", "os.environ")
    seen: set[int] = set()
    texts = _texts(code)
    attributes = (*code.co_names, *texts)
    # An attribute may have the name of a global that the code does not read.
    first = (held, str(held.get("__name__")), (*_globals_of(code), *texts))
    left: list[tuple[Any, str, tuple[str, ...]]] = [first]
    if is_users:
        left += [
            (vars(space), _place_of(space), attributes)
            for space in _imported(code, held)
        ]
    while left:
        at, where, names = left.pop()
        is_torch = at is not held and not may_read_users(where)
        if is_torch and not is_users:
            continue
        for key in names:
            value, name = at.get(key, MISSING), f"{where}.{key}"
            if value is MISSING:
                continue
            if isinstance(value, SPACES):
                if is_users:
                    rows.add(at, key, name)
                if id(value) not in seen and (is_users or at is held):
                    seen.add(id(value))
                    left.append((vars(value), _place_of(value), attributes))
            elif isinstance(value, _FUNCTIONS):
                if is_users or is_called(value):
                    rows.add(at, key, name)
            elif not is_torch and (_is_state if is_users else _is_plain)(value):
                rows.add(at, key, name)


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code looks up as globals."""
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname.endswith(("_GLOBAL", "_NAME"))
    }
    return tuple(name for name in code.co_names if name in found)


def _texts(code: types.CodeType) -> tuple[str, ...]:
    """Return texts by which code may read globals."""
    if "globals" not in code.co_names:
        return ()
    return tuple(text for text in code.co_consts if isinstance(text, str))


def _imported(code: types.CodeType, held: dict[str, Any]) -> list[types.ModuleType]:
    """Return the user's modules that a function itself imports."""
    package = str(held.get("__package__") or "")
    names = [n for key in code.co_names for n in (key, f"{package}.{key}")]
    found = [sys.modules.get(name) for name in names]
    return [m for m in found if isinstance(m, types.ModuleType) and is_own(m)]


def _place_of(space: Any) -> str:
    return space.__name__ if isinstance(space, types.ModuleType) else space.__module__


def _add_function(rows: WatchedRows, function: types.FunctionType) -> None:
    """Add a function's own values, and the variables that it closes over."""
    rows.add_function(function)
    cells = function.__closure__ or ()
    for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
        found = Cell(cell)
        value = found.get("", MISSING)
        if isinstance(value, SPACES):
            rows.follow(value)
        if isinstance(value, _CODE) or _is_state(value):
            rows.add(found, key, f"{key!r} in {function.__qualname__}")


_MAKES_NAMES = frozenset(
    (
        *("vars", "__dict__", "eval", "exec", "attrgetter", "methodcaller", "reduce"),
        *("__getattribute__", "getattr_static", "getmembers"),
    )
)
"""Functions by which code reads attributes whose names it does not contain."""

_READ_ENVIRONMENT = frozenset(("environ", "getenv"))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_CODE = (*SPACES, *_FUNCTIONS)


def _makes_names(code: types.CodeType) -> bool:
    """Return whether code reads attributes by names that it makes while it runs."""
    if not _MAKES_NAMES.isdisjoint(code.co_names):
        return True
    if "getattr" not in code.co_names:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):  # such as a part of an expression
        return True
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "getattr"
        and not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant))
        for node in ast.walk(tree)
    )


_SEED = "initial_seed"


def _lines_with(code: types.CodeType, name: str) -> set[int]:
    """Return the lines of code that contain a name or a text."""
    steps = (s for s in dis.get_instructions(code) if s.argval == name)
    lines = (s.positions.lineno for s in steps if s.positions is not None)
    return {line for line in lines if line is not None}


_APPENDS = frozenset(("append", "appendleft", "extend", "add"))


def may_return(code: types.CodeType | None) -> bool:
    """Return whether a function may return something else than None."""
    if code is None:
        return True
    before = None
    for step in dis.get_instructions(code):
        if step.opname in ("YIELD_VALUE", "RETURN_GENERATOR"):
            return True
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        if step.opname == "RETURN_VALUE" and not (
            before is not None
            and not step.is_jump_target
            and before.opname.startswith("LOAD_CONST")
            and before.argval is None
        ):
            return True
        before = step
    return False


def _only_appends(code: types.CodeType, name: str) -> bool:
    """Return whether code uses a variable only to append to it."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in _BETWEEN]
    return all(
        after.argval in _APPENDS
        for step, after in itertools.pairwise(steps)
        if step.argval == name and step.opname not in _DECLARES
    )


_BETWEEN = frozenset(("CACHE", "PUSH_NULL", "PRECALL", "NOP"))
_DECLARES = frozenset(("COPY_FREE_VARS", "MAKE_CELL"))


def _folders(code: types.CodeType) -> tuple[str, ...]:
    return Path(code.co_filename).parts


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_state(value: Any) -> bool:
    """Return whether a value may hold what a decision depends on."""
    if value is MISSING or isinstance(value, _CODE):
        return False
    if isinstance(value, (Tensor, torch.Generator)):
        return True
    if isinstance(value, (logging.Logger, logging.LoggerAdapter)):
        return True
    # Of torch's own parts, such as operators, nothing is a program's state.
    return not type(value).__module__.startswith(("logging", "torch._", "typing"))


def _is_layer(part: nn.Module) -> bool:
    """Return whether it is a torch module that runs as it is; containers are not."""
    place = type(part).__module__
    return place.startswith("torch.nn.modules") and not place.endswith("container")
