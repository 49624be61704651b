"""Functions and forwards of PyTorch that the program has replaced.

# Note [Replaced functions]
A program may replace one of PyTorch's functions by one of its own that calls it, such
as ``old = F.relu; F.relu = lambda x: old(x) / 2``. PyTorch then names to a mode the
function that has the name now, though its own was called. A mode that calls what it is
given would call the replacement twice. So modes ask `own_function` for what was called:
the function whose frame asked for the mode, or the method of the class on which
``torch.Tensor`` is based.

A replacement that calls PyTorch's function is recorded as any code: it becomes
operations of layers. But where ranks compute a batch norm or a dropout by themselves, a
replacement inside of it would be lost, so it is refused.
"""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.burst.tracing.torch_modules import BatchNorm, Dropout

if TYPE_CHECKING:
    from collections.abc import Iterator

_TORCH = str(Path(torch.__file__).parent)
_OVERRIDES: str = torch.overrides.__file__
_TENSOR_BASE: Any = torch._C.TensorBase  # noqa: SLF001
_CODELESS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)

_own: dict[types.CodeType, Any] = {
    held.__code__: held
    for space in (functional, torch.functional, torch, Tensor)
    for held in vars(space).values()
    if isinstance(held, types.FunctionType)
}
"""Functions by their code. Those that were replaced before are found later."""


def own_function(func: Any) -> Any:
    """Return the function of PyTorch's for which a mode is called.

    Args:
        func: what the mode is given; its ``__torch_function__`` is the caller.
    """
    if isinstance(func, _CODELESS) or _is_torchs(func):
        return func
    frame: types.FrameType | None = sys._getframe(2)  # noqa: SLF001
    asks = frame is not None and frame.f_code.co_filename == _OVERRIDES
    while frame is not None and frame.f_code.co_filename == _OVERRIDES:
        frame = frame.f_back
    if asks:
        if frame is None or not frame.f_code.co_filename.startswith(_TORCH):
            return func
        return _function_of(frame.f_code, func)
    name = next((key for key, held in vars(Tensor).items() if held is func), None)
    return func if name is None else getattr(_TENSOR_BASE, name, func)


def _function_of(code: types.CodeType, default: Any) -> Any:
    """Return the function that has this code."""
    if code not in _own:
        # Those of a program that froze the garbage collector are not found.
        found = [f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType)]
        _own[code] = next((f for f in found if f.__code__ is code), default)
    return _own[code]


def _is_torchs(func: Any) -> bool:
    """Return whether a function is PyTorch's own, or has no Python code."""
    code = getattr(func, "__code__", None)
    if code is None:
        place = getattr(func, "__module__", None) or "torch"
        return bool(place.partition(".")[0] == "torch")
    return bool(code.co_filename.startswith(_TORCH))


def is_torchs_forward(forward: Any) -> bool:
    """Return whether a forward is that of one of PyTorch's classes.

    A function that ``functools.wraps`` it has its module, but not its code.
    """
    place = getattr(forward, "__module__", None) or ""
    return place.startswith("torch.nn.modules") and _is_torchs(forward)


def line_of(func: Any) -> str:
    """Return where a function of the program's is defined, or its name."""
    code = getattr(func, "__code__", None)
    if code is None:
        return str(getattr(func, "__qualname__", type(func).__name__))
    return f"{code.co_filename}:{code.co_firstlineno}"


_SPACES: tuple[tuple[str, Any, frozenset[str]], ...] = (
    ("torch.nn.functional", functional, frozenset(vars(functional))),
    (
        "torch",
        torch,
        frozenset((*dir(torch._C._VariableFunctions), *torch.functional.__all__)),  # noqa: SLF001
    ),
    ("torch.Tensor", Tensor, frozenset(dir(_TENSOR_BASE)) | frozenset(vars(Tensor))),
    ("torch.nn.Module", nn.Module, frozenset(vars(nn.Module))),
)
"""Where PyTorch has functions, and their names; a program may add others."""


def replaced_in(module: nn.Module) -> Iterator[str]:
    """Yield what of PyTorch's is replaced, with lines.

    These are functions, methods of tensors and modules, and the forwards of PyTorch's
    classes and modules in a model.
    """
    for name, space, known in _SPACES:
        for key, held in list(vars(space).items()):
            if (
                key in known
                and isinstance(held, types.FunctionType)
                and not _is_torchs(held)
                and not held.__code__.co_filename.startswith(_STRETTO)
            ):
                yield f"{name}.{key} ({line_of(held)})"
    for kind in dict.fromkeys(
        kind
        for part in module.modules()
        for kind in type(part).__mro__
        if kind.__module__.startswith("torch.nn.modules.")
    ):
        for key in ("forward", "__call__"):
            held = vars(kind).get(key)
            if kind is not nn.Module and held is not None and not _is_torchs(held):
                yield f"torch.nn.{kind.__name__}.{key} ({line_of(held)})"
    for name, part in module.named_modules():
        held = vars(part).get("forward")
        if held is not None and type(part).__module__.startswith("torch.nn.modules."):
            yield f"the forward of {name or 'the model'!r} ({line_of(held)})"


_STRETTO = str(Path(__file__).parents[2])

_DROPS = {
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}
"""The functions of ``torch.nn.functional`` that dropouts call."""

REPLACED_FUNCTIONS = ("batch_norm", *_DROPS.values())
"""Functions inside of modules that ranks compute by themselves."""


def refused_inside(module: nn.Module) -> str | None:
    """Return why a norm or dropout can't run as PyTorch's, if its function is replaced.

    Its line comes before.
    """
    name = None
    if isinstance(module, BatchNorm):
        name = "batch_norm"
    elif isinstance(module, Dropout):
        name = next((n for kind, n in _DROPS.items() if isinstance(module, kind)), None)
    if name is None or _is_torchs(held := getattr(functional, name)):
        return None
    what = "batch norms" if name == "batch_norm" else "dropouts"
    return (
        f"calls torch.nn.functional.{name}, which {line_of(held)} replaces, by a "
        f"{type(module).__name__}: ranks compute {what} together, without it. Leave "
        "PyTorch's function as it is, and do what it adds in a forward of the model's"
    )
