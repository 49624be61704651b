"""Route calls of modules, functions and autocast through the running recorder.

# Note [Calls that change nothing]
A forward may call ``module.to(device)`` where the module already is. On parameters
without values torch would exchange them even then, so the conversion is tried on each
tensor, and nothing else is done if every result is the tensor itself.

# Note [Masks that are compared with the causal one]
``nn.Transformer`` reads the values of a mask to decide whether attention may compute
without it, with the same results. While a forward is recorded it computes with the
mask; layers decide by its values as usual.

# Note [Function.apply in Python and in C++]
Where ``torch.autograd.Function.apply`` is written in Python, its code is exchanged, so
that methods which a program bound earlier (``scale = Scale.apply``) are routed, too.
Where it is written in C++ (torch 2.14), only the attribute can be exchanged. A method
that was bound earlier is noticed when torch asks its class for ``_backward_cls``, which
nothing else does, and is refused with the line of its call.
"""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta
from torch.autograd.variable import Variable, VariableMeta
from torch.utils import _pytree as pytree

from stretto.burst.tracing.settings import changes, is_change
from stretto.burst.tracing.source_lines import source_line
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class FunctionRecorder(Protocol):
    """The receiver of routed calls of functions."""

    @property
    def is_within(self) -> bool:
        """Whether an operation runs now."""

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        """Record the tensors with which the model is called."""

    def function(
        self, call: Callable[..., Any], kind: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an ``autograd.Function``."""


class ConversionRecorder(Protocol):
    """The receiver of conversions of modules."""

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Leave what runs in the context out of the recording."""


class CallRecorder(FunctionRecorder, ConversionRecorder, Protocol):
    """The receiver of all routed calls: an `OperationRecorder`."""

    def module(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module."""

    def autocast_entered(self, entry: tuple[str, torch.dtype, bool, bool]) -> None:
        """Record that the module begins an autocast region."""

    def autocast_left(self) -> None:
        """Record that the module ends an autocast region."""


_active: list[FunctionRecorder] = []


def note_inputs(arguments: Any) -> None:
    """Pass the model's input tensors to the running recorder."""
    leaves = pytree.tree_leaves(arguments)
    for recorder in _active[-1:]:
        recorder.called_with(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _apply_code() -> types.CodeType:
    def outer() -> Any:
        __class__ = None

        def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ANN002, ANN003
            # This code becomes another function's, whose globals are not this module's.
            from stretto.burst.tracing.patching import applied

            return applied(cls, args, kwargs, __class__)

        return apply

    return outer().__code__  # type: ignore[no-any-return]


_original: list[Callable[..., Any]] = []


def applied(kind: Any, args: Any, kwargs: Any, _cell: Any) -> Any:
    """Serve `torch.autograd.Function.apply` while a forward is recorded."""
    return _active[-1].function(_original[-1], kind, args, kwargs)


@contextlib.contextmanager
def patched(recorder: CallRecorder) -> Iterator[None]:
    """Route calls of modules, functions and autocast through the recorder."""
    module_call = nn.Module.__call__
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    thread = threading.get_ident()

    def is_elsewhere() -> bool:
        return threading.get_ident() != thread

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_elsewhere():
            return module_call(module, *args, **kwargs)
        return recorder.module(module_call, module, args, kwargs)

    def entered(self: Any) -> Any:
        found = enter(self)  # type: ignore[no-untyped-call]
        if not (is_elsewhere() or recorder.is_within):
            recorder.autocast_entered(
                (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
            )
        return found

    def left(self: Any, *error: Any) -> Any:
        if not (is_elsewhere() or recorder.is_within):
            recorder.autocast_left()
        return leave(self, *error)

    _active.append(recorder)
    try:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        torch.autocast.__exit__ = left  # type: ignore[method-assign]
        with (
            functions_routed(recorder),
            _conversions_tried(recorder),
            _settings_kept(),
            _gradients_kept(),
            _variables_routed(),
            _masks_used(),
        ):
            yield
    finally:
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        torch.autocast.__exit__ = leave  # type: ignore[method-assign]
        _active.pop()


@contextlib.contextmanager
def _conversions_tried(recorder: ConversionRecorder) -> Iterator[None]:
    """Allow conversions of modules that change nothing.

    See Note [Calls that change nothing].
    """
    kinds: tuple[Any, ...] = (nn.Module, nn.RNNBase)
    own = [kind._apply for kind in kinds]  # noqa: SLF001
    thread = threading.get_ident()

    def convert(
        module: nn.Module, call: Callable[..., Any], *more: Any, **named: Any
    ) -> Any:
        if threading.get_ident() != thread:
            method = own[isinstance(module, nn.RNNBase)]
            return method(module, call, *more, **named)
        for part in module.modules():
            for held in (part._parameters, part._buffers):  # noqa: SLF001
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    with recorder.within():
                        is_same = call(tensor) is tensor
                    if not is_same:
                        raise SpecError(
                            f"{source_line()}: converts {name!r} of a "
                            f"{type(part).__name__} in forward, which layers on other "
                            "ranks would not: convert the model before it is captured"
                        )
        return module

    try:
        for kind in kinds:
            kind._apply = convert  # noqa: SLF001
        yield
    finally:
        for kind, method in zip(kinds, own, strict=True):
            kind._apply = method  # noqa: SLF001


@contextlib.contextmanager
def _replaced(name: str, method: Any) -> Iterator[None]:
    """Replace a method of all modules."""
    own = getattr(nn.Module, name)
    setattr(nn.Module, name, method)
    try:
        yield
    finally:
        setattr(nn.Module, name, own)


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Refuse a forward that assigns to a setting of a module; see `settings`."""
    own: Any = nn.Module.__setattr__
    thread = threading.get_ident()

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == thread and is_change(module, name, value):
            raise SpecError(f"{source_line()}: {changes(module, name)}")
        own(module, name, value)

    with _replaced("__setattr__", assign):
        yield


@contextlib.contextmanager
def _gradients_kept() -> Iterator[None]:
    """Refuse a forward that clears gradients, which layers would not."""
    own: Any = nn.Module.zero_grad
    thread = threading.get_ident()

    def refuse(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            own(module, *args, **kwargs)
            return
        raise SpecError(
            f"{source_line()}: clears gradients in forward, which layers on other "
            "ranks would not: do it in the training loop"
        )

    with _replaced("zero_grad", refuse):
        yield


@contextlib.contextmanager
def _variables_routed() -> Iterator[None]:
    """Call ``detach``, which is recorded, where a program calls ``Variable(tensor)``.

    It is what this class of early versions does, unseen by function modes.
    """

    def call(kind: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("data", "requires_grad"), args, strict=False)) | kwargs
        data, needs = given.pop("data", None), given.pop("requires_grad", False)
        if kind is not Variable or args[2:] or given or not isinstance(data, Tensor):
            return type.__call__(kind, *args, **kwargs)
        found = data.detach()
        return found.requires_grad_() if needs else found

    meta: Any = VariableMeta
    meta.__call__ = call
    try:
        yield
    finally:
        del meta.__call__


@contextlib.contextmanager
def _masks_used() -> Iterator[None]:
    """Let torch's transformers use their masks.

    See Note [Masks that are compared with the causal one].
    """
    module: Any = nn.modules.transformer
    own = module._detect_is_causal_mask  # noqa: SLF001

    def detect(_mask: Any, is_causal: Any = None, _size: Any = None) -> bool:
        return bool(is_causal)

    try:
        module._detect_is_causal_mask = detect  # noqa: SLF001
        yield
    finally:
        module._detect_is_causal_mask = own  # noqa: SLF001


@contextlib.contextmanager
def rare_calls_routed(answers: ConversionRecorder) -> Iterator[None]:
    """Route calls that few models make in forward, as `patched` does."""
    with _conversions_tried(answers), _variables_routed(), arguments_unchecked():
        yield


@contextlib.contextmanager
def arguments_unchecked() -> Iterator[None]:
    """Let distributions not check their arguments, for which they read values."""
    distribution: Any = torch.distributions.Distribution
    before = distribution._validate_args  # noqa: SLF001
    distribution.set_default_validate_args(value=False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(value=before)


@contextlib.contextmanager
def functions_answered(answers: FunctionRecorder) -> Iterator[None]:
    """Route calls of functions alone."""
    _active.append(answers)
    try:
        with functions_routed(answers):
            yield
    finally:
        _active.pop()


def functions_routed(
    recorder: FunctionRecorder,
) -> contextlib.AbstractContextManager[None]:
    """Route calls of functions, see Note [Function.apply in Python and in C++]."""
    apply: Any = getattr(torch.autograd.Function.apply, "__func__", None)
    if apply is None:
        return _attribute_exchanged(recorder)
    return _code_exchanged(apply)


@contextlib.contextmanager
def _code_exchanged(apply: Any) -> Iterator[None]:
    code = apply.__code__
    original = types.FunctionType(
        code, apply.__globals__, "apply", apply.__defaults__, apply.__closure__
    )
    _original.append(original)
    try:
        apply.__code__ = _apply_code()
        yield
    finally:
        apply.__code__ = code
        _original.pop()


@contextlib.contextmanager
def _attribute_exchanged(recorder: FunctionRecorder) -> Iterator[None]:
    function: Any = torch.autograd.Function
    meta: Any = FunctionMeta
    method = function.__dict__["apply"]
    look_up, own = meta.__getattribute__, meta.__dict__.get("__getattribute__")
    thread = threading.get_ident()

    def original(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, kind)(*args, **kwargs)

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(kind, args, kwargs, None)

    def asked(kind: Any, name: str) -> Any:
        if (
            name == "_backward_cls"
            and not recorder.is_within
            and threading.get_ident() == thread
        ):
            raise SpecError(
                f"{source_line()}: calls a method {kind.__name__}.apply that was bound "
                "before forward, which this version of torch calls without asking: "
                f"write {kind.__name__}.apply(...) in forward"
            )
        return look_up(kind, name)

    _original.append(original)
    try:
        function.apply = classmethod(apply)
        meta.__getattribute__ = asked
        yield
    finally:
        if own is None:
            del meta.__getattribute__
        else:
            meta.__getattribute__ = own
        function.apply = method
        _original.pop()
