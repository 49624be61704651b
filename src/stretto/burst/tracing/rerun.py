"""Run forward's Python code again before a step, without computing tensors.

# Note [Forward is run again]
A capture repeats the tensor operations that Python code chose when it was recorded. The
code may choose by anything: an attribute, a file, the answer of a library. A list of
such reads can't be complete (see `tracing.reads`), so the code itself runs again before
each step, as it would in one process. Each call of a torch function is compared with
the recorded one, and answered with the recorded result. Nothing is computed and no
tensor is written, so a call costs a few microseconds. If any call, argument, mode or
output differs, forward no longer does what was captured, and it is captured again
before the step.

A call is recorded as its caller sees it: a module that runs as one operation is one
call, whatever runs inside. Calls without tensors, such as those that set a mode, are
made as usual. Parameters and buffers stay in their modules; the recording knows their
twins without values by their places.

What forward keeps outside of the call, such as a table that it caches, gets its earlier
value afterwards: it would be a tensor without values, or depend on the number of
samples in the recording. Other values stay, so that a later call finds what the first
one computed, as in one process.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from functools import partial
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from stretto.burst.hooks import HOOKS
from stretto.burst.memory import bytes_of
from stretto.burst.tracing.caches import Cache, Holder, entries_in, restored, tensors_in
from stretto.burst.tracing.freezing import Freezer
from stretto.burst.tracing.patching import functions_answered, rare_calls_routed
from stretto.burst.tracing.replaced import own_function
from stretto.burst.tracing.settings import is_setting
from stretto.burst.tracing.source_lines import (
    line_setting,
    source_line,
    source_line_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

    from stretto.burst.tracing.reads import Ambient

_CHECKPOINT: Any = torch.utils.checkpoint.CheckpointFunction
_LIFT = torch.ops.aten.lift_fresh.default
_MISSING = object()


@final
class _Place:
    """Where a module holds a parameter or buffer."""

    __slots__ = ("_held", "_key", "tensor")

    def __init__(self, held: Mapping[str, Any], key: str) -> None:
        self._held, self._key = held, key
        self.tensor: Any = None
        """The tensor that is there when forward begins."""

    def begin(self) -> None:
        """Note what is there now."""
        self.tensor = self._held.get(self._key)

    def is_same(self) -> bool:
        """Return whether the same is there as when forward began."""
        return self._held.get(self._key) is self.tensor


@final
class _Value(NamedTuple):
    """A tensor that a constructor such as ``torch.FloatTensor`` made."""

    made: Tensor
    """Without values."""

    tensor: Tensor


_NAMED = (_Place, _Value)

_PLAIN = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
"""Types of arguments that do not change."""


@final
class _Other:
    """An object of another type, with a copy of its content."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: Any) -> None:
        """Prepare; ``parts`` is None inside of the object itself."""
        self.kind, self.parts = kind, parts

    def is_same(self, value: Any) -> bool:
        """Return whether an object has the same type and content."""
        if type(value) is not self.kind or self.parts is None:
            return type(value) is self.kind
        if isinstance(value, (tuple, list, dict)):
            plain = next(k for k in (tuple, list, dict) if isinstance(value, k))
            content, attributes = self.parts
            return _is_same(content, plain(value)) and _is_same(
                attributes, _attributes_of(value)
            )
        if isinstance(value, FunctionType):
            code, inside = self.parts
            return code is value.__code__ and _is_same(inside, _inside(value))
        return bool(self.parts == _content_of(value))


def _attributes_of(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _inside(function: FunctionType) -> tuple[Any, ...]:
    """Return what a function closes over, and its default values."""
    cells = function.__closure__ or ()
    return (
        tuple(_in_cell(cell) for cell in cells),
        function.__defaults__,
        function.__kwdefaults__,
    )


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _content_of(value: Any) -> Any:
    """Return a copy of an object's content that can be compared with a later one."""
    if isinstance(value, (float, complex)):  # of NumPy; also the sign of a zero
        return repr(value)
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    return Freezer(None, ())(value)


_Setting = tuple[dict[str, Any], str, Any]
"""The attributes of a module, and the name and the value of one."""


def _settings_of(module: nn.Module) -> list[_Setting]:
    """Return the modes of a module and those in it, and settings of torch's ones."""
    return [
        (vars(part), key, value)
        for part in module.modules()
        for key, value in vars(part).items()
        if is_setting(part, key, value)
    ]


def _are_same(settings: Iterable[_Setting]) -> bool:
    return all(held.get(key, value) is value for held, key, value in settings)


@final
class TorchCall(NamedTuple):
    """One call of a torch function, a module or an ``autograd.Function``."""

    call: Any

    args: Any

    kwargs: Any

    result: Any

    is_made: bool
    """Whether the result is made again for each caller: it has lists or dictionaries,
    which a caller may change, or is a tensor that a module holds."""

    modes: tuple[Any, ...]

    settings: list[_Setting]
    """A module's settings that a call reads, as they were."""


_READS = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.ndimension, Tensor.element_size, Tensor.get_device),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(Tensor.stride, Tensor.storage_offset),
    )
)
_ATTRIBUTES_READ = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes"),
        *("requires_grad", "is_leaf", "is_cuda", "is_sparse", "is_meta"),
    )
)


def _is_read(call: Any) -> bool:
    """Return whether a call only reads a tensor's sizes, type or the like.

    Code that keeps them for later calls reads them in its first call alone.
    """
    try:
        if call.__name__ == "__get__":
            return call.__self__.__name__ in _ATTRIBUTES_READ
    except AttributeError:  # a module
        return False
    return call in _READS


def _modes_of(device: str) -> tuple[Any, ...]:
    """Return the modes that decide what a call computes."""
    on_cpu = torch.is_autocast_enabled("cpu")
    on_device = on_cpu if device == "cpu" else torch.is_autocast_enabled(device)
    if not (on_cpu or on_device):
        return (torch.is_grad_enabled(),)
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
        on_cpu and torch.get_autocast_dtype("cpu"),
        on_device and torch.get_autocast_dtype(device),
    )


@final
class TorchCalls:
    """The calls of one forward, in order.

    Args:
        modules: whose parameters and buffers were replaced while they were recorded.
        device: the type of the model's device.
    """

    def __init__(self, modules: Iterable[nn.Module], device: str) -> None:
        self._places: dict[int, _Place] = {}
        self.places: dict[int, list[_Place]] = {}
        """Places of each module, by its id."""
        for part in modules:
            own = self.places[id(part)] = []
            for held in (part._parameters, part._buffers):  # noqa: SLF001
                for key, tensor in held.items():
                    own.append(_Place(held, key))
                    self._places.setdefault(id(tensor), own[-1])
        self._values: dict[int, _Value] = {}
        self._path: set[int] = set()
        """The objects that are being copied, by id."""
        self.device = device
        self.calls: list[TorchCall] = []
        self.has_functions = False
        """Whether an ``autograd.Function`` was called."""

    def begin(self) -> None:
        """Note the parameters and buffers of all modules."""
        for own in self.places.values():
            for place in own:
                place.begin()

    def add(self, call: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call; one that only reads what a tensor is is left out."""
        if _is_read(call):
            return
        if call is _LIFT:  # is called only where tensors have no values, see `made`
            return
        if not (_has_tensor(result) or _has_tensor(args) or _has_tensor(kwargs)):
            return
        self.calls.append(
            TorchCall(
                call,
                self._kept(args),
                self._kept(kwargs),
                self._given(result),
                self._is_made(result),
                _modes_of(self.device),
                _settings_of(call) if isinstance(call, nn.Module) else [],
            )
        )

    def made(self, tensor: Tensor, value: Tensor) -> None:
        """Record the value of a tensor that a constructor made."""
        self._values[id(tensor)] = _Value(tensor, value)

    def _is_made(self, result: Any) -> bool:
        kind = type(result)
        if kind is tuple:
            return any(map(self._is_made, result))
        if isinstance(result, Tensor):
            return isinstance(self._kept(result), _NAMED)
        return kind in (list, dict, np.ndarray)

    def _given(self, result: Any) -> Any:
        """Return what `_made` makes a result of."""
        if isinstance(result, Tensor):
            return self._kept(result)
        kind = type(result)
        if kind in (tuple, list):
            return kind(map(self._given, result))
        if kind is dict:
            return {key: self._given(inner) for key, inner in result.items()}
        return result

    def _kept(self, value: Any) -> Any:
        """Return a copy of arguments, with places for what modules hold."""
        if isinstance(value, Tensor):
            number = id(value)
            return self._places.get(number) or self._values.get(number) or value
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (nn.Module, type)):
            return value
        if kind in (tuple, list):
            return kind(map(self._kept, value))
        if kind is dict:
            return {key: self._kept(inner) for key, inner in value.items()}
        if kind is slice:
            return slice(*map(self._kept, (value.start, value.stop, value.step)))
        if id(value) in self._path:  # such as a function that calls itself
            return _Other(kind, None)
        self._path.add(id(value))
        try:
            return _Other(kind, self._parts(value))
        finally:
            self._path.discard(id(value))

    def _parts(self, value: Any) -> Any:
        """Return a copy of the content of another object, see `_Other`."""
        if isinstance(value, (tuple, list, dict)):
            plain = next(k for k in (tuple, list, dict) if isinstance(value, k))
            return self._kept(plain(value)), self._kept(_attributes_of(value))
        if isinstance(value, FunctionType):
            return value.__code__, self._kept(_inside(value))
        return _content_of(value)


def _has_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or a container with one."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return False


def _made(value: Any) -> Any:
    """Return a result as a caller gets it."""
    kind = type(value)
    if kind is _Place:
        return value.tensor
    if kind is _Value:
        return value.made
    if kind in (tuple, list):
        return kind(map(_made, value))
    if kind is dict:
        return {key: _made(inner) for key, inner in value.items()}
    return value.copy() if kind is np.ndarray else value


def _is_same(known: Any, value: Any) -> bool:
    """Return whether an argument is as recorded."""
    if known is value:
        return True
    kind = type(known)
    if kind is _Place:
        return known.tensor is value
    if kind is _Value:
        return value is known.made or _is_equal(known.tensor, value)
    if kind is _Other:
        return bool(known.is_same(value))
    if isinstance(known, Tensor):  # of no module; the program may replace it
        return type(known) is Tensor and _is_equal(known, value)
    if kind is not type(value):
        return False
    if kind in (float, complex):  # also the sign of a zero
        return repr(known) == repr(value)
    if kind in (tuple, list):
        return len(known) == len(value) and all(map(_is_same, known, value))
    if kind is dict:
        return list(known) == list(value) and all(
            map(_is_same, known.values(), value.values())
        )
    if kind is slice:
        return (
            _is_same(known.start, value.start)
            and _is_same(known.stop, value.stop)
            and _is_same(known.step, value.step)
        )
    return bool(known == value)


def _is_equal(one: Tensor, two: Any) -> bool:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return (
            type(two) is Tensor
            and one.dtype == two.dtype
            and one.shape == two.shape
            and one.device == two.device
            and one.layout == two.layout == torch.strided
            and one.stride() == two.stride()
            and one.requires_grad == two.requires_grad
            and bytes(bytes_of(one)) == bytes(bytes_of(two))
        )


class _Differs(BaseException):
    """Ends a forward that does something else than was recorded.

    It is not an ``Exception``, so that the user's code does not handle it.
    """


@final
class _Answers(TorchFunctionMode):
    """Compares calls with the recorded ones, and answers them, while it is entered."""

    def __init__(self, known: TorchCalls) -> None:
        super().__init__()
        self._known = known
        self._number = 0
        self._thread = threading.get_ident()
        self._unsettled_place: str | None = None
        self.unsettled: list[TorchCall] = []
        """Calls of modules whose settings are not as they were."""
        self.place: str | None = None
        """The line of the first call that differs."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = own_function(func)
        if _is_read(func):
            return func(*args, **(kwargs or {}))
        found = self._answer(func, args, kwargs or {})
        if found is not _MISSING:
            return found
        if not (_has_tensor(args) or _has_tensor(kwargs)):
            result = func(*args, **(kwargs or {}))
            if not _has_tensor(result):  # such as one that sets a mode
                return result
        raise self._differs()

    def function(
        self, call: Callable[..., Any], kind: Any, args: Any, kwargs: Any
    ) -> Any:
        """Answer a call of an ``autograd.Function``."""
        if threading.get_ident() != self._thread:
            return call(kind, *args, **kwargs)
        if kind is _CHECKPOINT:  # recorded without the checkpoint
            return args[0](*args[2:])
        found = self._answer(kind, args, kwargs)
        if found is _MISSING:
            raise self._differs()
        return found

    def module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of a module that runs as one operation."""
        if threading.get_ident() == self._thread and self._has_own_tensors(module):
            found = self._answer(module, args, kwargs)
            if found is not _MISSING:
                return found
        return module._call_impl(*args, **kwargs)  # noqa: SLF001

    def _has_own_tensors(self, module: nn.Module) -> bool:
        """Return whether a module runs with its own tensors.

        ``torch.func.functional_call`` runs it with others.
        """
        places = self._known.places
        return all(
            place.is_same()
            for part in module.modules()
            for place in places.get(id(part), ())
        )

    def _answer(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return the recorded result if the next recorded call is this one."""
        calls = self._known.calls
        if self.place is not None or self._number == len(calls):
            return _MISSING
        known = calls[self._number]
        if not (
            (known.call is call or known.call == call)
            and _is_same(known.args, args)
            and _is_same(known.kwargs, kwargs)
            and known.modes == _modes_of(self._known.device)
        ):
            return _MISSING
        self._number += 1
        if known.settings and not _are_same(known.settings):
            self._unsettled_place = self._unsettled_place or source_line()
            self.unsettled.append(known)
        return _made(known.result) if known.is_made else known.result

    def _differs(self) -> _Differs:
        if self.place is None:
            self.place = source_line()
        return _Differs()

    @property
    def is_within(self) -> bool:
        """Whether an operation runs now: never, as it is only answered."""
        return False

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Leave what runs in the context out of the comparison."""
        found: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()  # noqa: SLF001
        return found

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        """Accept the tensors with which the model is called."""

    def place_of_settings(self) -> str | None:
        """Return the line of the first call with other settings, if there is one."""
        return self._unsettled_place

    def is_complete(self) -> bool:
        """Return whether all recorded calls were made."""
        return self.place is None and self._number == len(self._known.calls)


@final
class Rerun:
    """Runs a forward again, to find whether it does what was recorded.

    Args:
        run: calls forward with an input, and returns a tensor and a description of
            what else the output is.
        source: the recorded input.
        expected: what ``run`` returned for it when forward was recorded.
        calls: the recorded calls.
        own: modules of the user's classes.
        leaves: modules that run as one operation.
        caches: those in which forward keeps constants, as at capture.
        changed: containers that forward changes.
        kept: the entries of these that stay, by the ids of containers and by keys.
        ambient: the modes in which it was recorded.
        device: of the model's parameters.
        has_rare_calls: whether it makes calls that must be routed for all modules, see
            `patching.rare_calls_routed`.
    """

    def __init__(
        self,
        run: Callable[[Tensor], tuple[Tensor, Any]],
        source: Tensor,
        expected: tuple[Tensor, Any],
        calls: TorchCalls,
        *,
        own: Sequence[nn.Module],
        leaves: Sequence[nn.Module],
        caches: Sequence[Cache],
        changed: Sequence[Holder],
        kept: Set[tuple[int, Any]],
        ambient: Ambient,
        device: torch.device,
        has_rare_calls: bool,
    ) -> None:
        self._run = run
        self._has_rare_calls = has_rare_calls
        self._source, self._expected, self._calls = source, expected, calls
        self._own, self._leaves = own, leaves
        self._caches, self._changed, self._kept = caches, changed, kept
        self.has_kept = False
        """Whether the last run left another value in an entry."""
        self._ambient, self._device = ambient, device

    def is_all_code(self) -> bool:
        """Return whether it runs all code of the user's: no layer runs any."""
        return not self._calls.has_functions and all(
            type(part).__module__.startswith("torch.nn.modules.")
            and not _has_hooks(part)
            for leaf in self._leaves
            for part in leaf.modules()
        )

    def difference(self, *, keeps: bool = True) -> str | None:
        """Return the line at which forward now does something else, or None.

        ``keeps``: whether what it keeps stays if it does the same.
        """
        self.has_kept = False
        with self._undone(keeps=keeps) as same:
            place = self._place() or self._forgotten()
            if place is None:
                same.append(True)
        return place

    def _forgotten(self) -> str | None:
        """Delete attributes that got tensors without values; return a line of one."""
        place = None
        for part in self._own:
            for held in (vars(part), part._buffers):  # noqa: SLF001
                for key in [k for k, v in held.items() if type(v) is FakeTensor]:
                    del held[key]
                    name = f"the attribute {key!r} of {type(part).__name__}"
                    place = line_setting(part, key).removesuffix(": ") or name
        return place

    @contextlib.contextmanager
    def _undone(self, *, keeps: bool) -> Iterator[list[bool]]:
        """Undo changes of containers afterwards, except what stays.

        That is nothing unless the list that is yielded gets an item.
        """
        before = [Holder.now(holder.of) for holder in self._changed]
        same: list[bool] = []
        try:
            yield same
        finally:
            for holder in before:
                now = entries_in(holder.of)
                changed = []
                for key in {**now, **holder.before}:
                    value = now.get(key, _MISSING)
                    if value is holder.before.get(key, _MISSING):
                        continue
                    stays = keeps and same and (id(holder.of), key) in self._kept
                    if stays and not tensors_in(value, Tensor):
                        self.has_kept = True
                        continue
                    changed.append(key)
                if changed:
                    holder.restore(changed)

    def _place(self) -> str | None:
        answers = _Answers(self._calls)
        if (place := self._run_again(answers)) is not None or not answers.unsettled:
            return place
        # The program may have changed settings before forward, or forward for a call.
        for known in answers.unsettled:
            known.settings[:] = _settings_of(known.call)
        answers = _Answers(self._calls)
        if (place := self._run_again(answers)) is not None:
            return place
        return answers.place_of_settings()

    def _run_again(self, answers: _Answers) -> str | None:
        self._calls.begin()
        with (
            self._ambient.set(self._device),
            restored(self._caches),
            _leaves_routed(self._leaves, answers),
            functions_answered(answers)
            if self._calls.has_functions
            else contextlib.nullcontext(),
            rare_calls_routed(answers)
            if self._has_rare_calls
            else contextlib.nullcontext(),
        ):
            try:
                return contextvars.copy_context().run(self._difference, answers)
            except _Differs:
                return answers.place
            except Exception as exc:  # noqa: BLE001 - of the user's code
                return answers.place or source_line_in(exc, "forward")

    def _difference(self, answers: _Answers) -> str | None:
        with answers:
            tensor, others = self._run(self._source)
        if answers.place is not None:
            return answers.place
        known, known_others = self._expected
        same = tensor is known and _is_same(known_others, others)
        return None if same and answers.is_complete() else "the output of forward"


def _has_hooks(part: nn.Module) -> bool:
    return any(vars(part)[kind] for kind in HOOKS)


@contextlib.contextmanager
def _leaves_routed(leaves: Iterable[nn.Module], answers: _Answers) -> Iterator[None]:
    """Let calls of modules be answered.

    By the attribute in which ``Module.compile()`` stores its function, as it concerns
    these modules alone. A new method of all modules in each step would empty Python's
    caches of attributes, which hold a limited number of versions.
    """
    held = [(part.__dict__, partial(answers.module, part)) for part in leaves]
    for attributes, call in held:
        attributes[_COMPILED] = call
    try:
        yield
    finally:
        for attributes, _ in held:
            attributes.pop(_COMPILED, None)


_COMPILED = "_compiled_call_impl"
