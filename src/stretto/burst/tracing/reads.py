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
import gc
import inspect
import os
import sys
import textwrap
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.tracing.freezing import ATOMS, INSTALLED, Freezer, may_read_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OF_LAYERS = ("training", "p", "dropout")
"""Attributes that change the meaning of torch's own modules, which run as they are."""

_MISSING = object()


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Leave `torch.inference_mode`, with the grad mode unchanged.

    For values that are computed once and used by later forwards and backwards, which
    inference tensors do not allow.
    """
    grad = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        yield


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
@dataclass(frozen=True, slots=True)
class _Row:
    held: Any
    """Place of the value: the ``__dict__`` of a module, class or file."""

    key: str

    value: Any

    frozen: Any
    """``None`` if identity decides."""

    name: str

    freeze: Freezer

    is_quickly_same: Any
    """Whether the same object has kept its content, as far as that shows without a
    copy; otherwise the content is compared."""

    def holds(self) -> bool:
        value = self.held.get(self.key, _MISSING)
        if self.frozen is None:
            return value is self.value
        if value is self.value and self.is_quickly_same(value):
            return True
        return bool(self.freeze(value) == self.frozen)


def _quick_test(value: Any, freeze: Freezer) -> Callable[[Any], bool]:
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

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def changed(self) -> str | None:
        """Return the name of a value that has changed, or None."""
        for row in self._rows:
            if not row.holds():
                return row.name
        return None


@final
class Reads:
    """Records which attributes of a model's modules are read."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules = {id(part): (name, part) for name, part in root.named_modules()}
        self._found: dict[tuple[int, str], None] = {}
        self._codes: dict[int, types.CodeType] = {}
        self._helpers: list[tuple[types.CodeType, dict[str, Any]]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record each attribute that is read meanwhile."""
        found, known = self._found, self._modules
        read = object.__getattribute__

        def note(module: nn.Module, name: str) -> Any:
            if name not in _INTERNAL and name[:2] != "__" and id(module) in known:
                found[id(module), name] = None
            elif name == "__dict__" and id(module) in known:
                caller = sys._getframe(1)  # noqa: SLF001 - vars() and self.__dict__
                if may_read_users(caller.f_globals.get("__name__")):
                    found.update(((id(module), key), None) for key in vars_of(module))
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
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
            del kind.__getattribute__

    def _called(self, frame: types.FrameType, _event: str, _arg: Any) -> None:
        """Record a function of the user's that forward calls, see `_add_helpers`.

        It returns None so that the function's lines are not traced.
        """
        code = frame.f_code
        if id(code) in self._codes:  # equal code may be another function's
            return
        self._codes[id(code)] = code
        if may_read_users(frame.f_globals.get("__name__")):
            self._helpers.append((code, frame.f_globals))

    def watch(self, *, is_between: bool = True) -> Watch:
        """Return all values as they are now.

        They are for a comparison between steps, or else with what one forward changes:
        then tensors and the state of installed packages do not count.
        """
        tensors = is_between
        rows: dict[tuple[int, str], _Row] = {}
        deep: set[int] = set()
        freeze = Freezer(self._names(), self._modules.keys(), tensors=tensors)

        def add(held: Any, key: str, name: str) -> None:
            value = held.get(key, _MISSING)
            frozen = None
            if isinstance(value, ATOMS) or (
                value is not _MISSING and id(value) not in deep
            ):
                deep.add(id(value))
                frozen = freeze(value)
            elif not tensors:
                return
            quick = _quick_test(value, freeze)
            rows[id(held), key] = _Row(held, key, value, frozen, name, freeze, quick)

        for number, key in self._found:
            prefix, part = self._modules[number]
            name = f"{prefix}.{key}" if prefix else key
            if _is_layer(part):
                if key in _OF_LAYERS:
                    add(vars(part), key, name)
                continue
            if key in part._parameters or key in part._modules:  # noqa: SLF001
                continue  # see `Structure`
            if key in part._buffers:  # noqa: SLF001
                add(part._buffers, key, name)  # noqa: SLF001
                continue
            add(vars(part), key, name)
            if key not in vars(part):
                for kind in type(part).__mro__:
                    if key in vars(kind) and _is_value(vars(kind)[key]):
                        add(vars(kind), key, name)
                        break
        for prefix, part in self._modules.values():
            for key in HOOKS[2:] if part is self._root else HOOKS:
                if part is self._root or not _is_layer(part):
                    add(vars(part), key, f"the hooks of {prefix or 'the model'}")
        self._add_globals(add)
        self._add_helpers(add, installed=is_between)
        return Watch(list(rows.values()))

    def _names(self) -> set[str] | None:
        """Return the names that functions called by forward contain.

        None if functions of the user's make names while they run.
        """
        if any(
            INSTALLED.isdisjoint(_folders(code)) and _makes_names(code)
            for code, _ in self._helpers
        ):
            return None
        names: set[str] = set()
        for code, _ in self._helpers:
            names.update(code.co_names)
            names.update(c for c in code.co_consts if isinstance(c, str))
        return names

    def _add_globals(self, add: Any) -> None:
        """Add plain globals that the modules' own functions name."""
        kinds = {
            kind
            for _, part in self._modules.values()
            for kind in type(part).__mro__
            if not kind.__module__.startswith("torch.")
        }
        for kind in sorted(kinds, key=lambda k: (k.__module__, k.__qualname__)):
            for method, function in vars(kind).items():
                if not isinstance(function, types.FunctionType):
                    continue
                if self._is_called(function):
                    add(vars(kind), method, f"{kind.__qualname__}.{method}")
                    self._add_defaults(add, function)
                held = function.__globals__
                for key in function.__code__.co_names:
                    if isinstance(held.get(key), (bool, int, float, str)):
                        add(held, key, f"{function.__module__}.{key}")

    def _add_helpers(self, add: Any, *, installed: bool) -> None:
        """Add names from outside that functions called by forward use.

        These are globals, attributes of imported modules and of classes, and values
        that a function closes over, if they are plain; of installed packages only
        numbers and texts. Cells are found by the functions that have the code.
        """
        for code, held in self._helpers:
            if not _READ_ENVIRONMENT.isdisjoint(code.co_names):
                add(vars(os), "environ", "os.environ")
            is_users = INSTALLED.isdisjoint(_folders(code))
            if not is_users and not installed:
                continue
            is_state = _is_state if is_users else _is_plain
            for key in code.co_names:
                value = held.get(key, _MISSING)
                if isinstance(value, (types.ModuleType, type)):
                    name = getattr(value, "__module__", value.__name__)
                    if not may_read_users(name):
                        continue
                    for inner in code.co_names:
                        if is_state(vars(value).get(inner, _MISSING)):
                            add(vars(value), inner, f"{value.__name__}.{inner}")
                elif is_state(value) or self._is_called(value):
                    add(held, key, f"{held.get('__name__')}.{key}")
                    self._add_defaults(add, value)
        closing = [
            code
            for code, _ in self._helpers
            if code.co_freevars and (installed or INSTALLED.isdisjoint(_folders(code)))
        ]
        # One search for all: it visits every object of the process.
        for function in gc.get_referrers(*closing) if closing else ():
            if not isinstance(function, types.FunctionType):
                continue
            code = function.__code__
            cells = function.__closure__ or ()
            for key, cell in zip(code.co_freevars, cells, strict=True):
                found = _Cell(cell)
                if _is_state(found.get("", _MISSING)):
                    add(found, "", f"{key!r} in {function.__qualname__}")

    @staticmethod
    def _add_defaults(add: Any, function: Any) -> None:
        """Add a function's default values, if one may be written into."""
        if not isinstance(function, types.FunctionType):
            return
        values = (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
        if any(not isinstance(value, ATOMS) and _is_value(value) for value in values):
            name = f"the default arguments of {function.__qualname__}"
            add(_Defaults(function), "", name)

    def _is_called(self, value: Any) -> bool:
        """Return whether it is a function that forward calls."""
        return isinstance(value, types.FunctionType) and (
            id(value.__code__) in self._codes
        )


@final
class _Cell:
    """A variable that a function closes over, read like a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, _key: str, missing: Any = None) -> Any:
        """Return the content of the cell."""
        try:
            return self._cell.cell_contents
        except ValueError:  # not set yet
            return missing


@final
class _Defaults:
    """A function's default values, read like a dictionary."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def get(self, _key: str, _missing: Any = None) -> Any:
        """Return the values."""
        return self._function.__defaults__, self._function.__kwdefaults__


_MAKES_NAMES = frozenset(
    (
        *("vars", "__dict__", "eval", "exec", "attrgetter", "methodcaller", "reduce"),
        *("__getattribute__", "getattr_static", "getmembers"),
    )
)
"""Functions by which code reads attributes whose names it does not contain."""

_READ_ENVIRONMENT = frozenset(("environ", "getenv"))
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


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


def _folders(code: types.CodeType) -> tuple[str, ...]:
    return Path(code.co_filename).parts


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_value(value: Any) -> bool:
    """Return whether a class attribute is a value and neither code nor a descriptor."""
    return isinstance(value, ATOMS) or (
        _is_state(value) and not hasattr(type(value), "__get__")
    )


def _is_state(value: Any) -> bool:
    """Return whether a value may hold what a decision depends on."""
    if value is _MISSING or isinstance(value, _CODE):
        return False
    if isinstance(value, (Tensor, torch.Generator)):
        return True
    return not type(value).__module__.startswith(("logging", "torch.", "typing"))


def _is_layer(part: nn.Module) -> bool:
    """Return whether it is a torch module that runs as it is; containers are not."""
    place = type(part).__module__
    return place.startswith("torch.nn.modules") and not place.endswith("container")
