"""Gradients of buckets whose communication has not finished.

# Note [A wrapper in place of the gradient]
After a backward, ``p.grad`` of an unfinished bucket is a `LazyGradient`: a tensor
without memory. Whatever reads or writes it first finishes all buckets, which puts the
real gradients back, and then runs on the real one. Python's operations arrive in
``__torch_function__``, and those of C++ (the engine's accumulation) in
``__torch_dispatch__``. ``p.grad is None`` and ``p.grad = None`` touch nothing.

A list of gradients that a program took earlier keeps its wrappers. They stay bound to
their real tensors, so a wrapper is used again only if nothing else refers to it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def _getters(*names: str) -> set[Any]:
    base: Any = torch._C.TensorBase  # noqa: SLF001
    return {getattr(base, name).__get__ for name in names}


METADATA = _getters(
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad"
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_floating_point,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
}
"""Reads that do not depend on a tensor's values."""


class LazyGradient(torch.Tensor):
    """A gradient under way. See Note [A wrapper in place of the gradient]."""

    target: torch.Tensor | None
    """The gradient itself, which is complete once all buckets are finished."""

    finish: Callable[[], None] | None
    """Finishes all buckets; ``None`` once they are."""

    member: Any
    """The parameter in its bucket; ``None`` once its bucket is finished."""

    part: Any
    """The same if norms are known before gradients, also after it is finished."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Finish, then call ``func`` with the real gradients."""
        if func in _BY_PARTS and args and _NAMED.issuperset(kwargs or ()):
            found = _BY_PARTS[func](func, *args, **(kwargs or {}))
            if found is not None:
                return found
        if func in _ESCAPES or _writes(func):
            _forget_norms((args, kwargs))
        wait = func not in METADATA
        named = {k: _real(v, wait=wait) for k, v in (kwargs or {}).items()}
        return func(*(_real(value, wait=wait) for value in args), **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Finish, then run an operator on the real gradients."""
        _show_gradients(args)
        named = {k: _real(v, wait=True) for k, v in (kwargs or {}).items()}
        return func(*(_real(value, wait=True) for value in args), **named)


def _real(value: Any, *, wait: bool) -> Any:
    """Return a value with the real gradient in place of each wrapper."""
    if isinstance(value, LazyGradient):
        if wait and value.finish is not None:
            value.finish()
        return value.target
    if type(value) in (list, tuple):
        return type(value)(_real(v, wait=wait) for v in value)
    if type(value) is dict:
        return {k: _real(v, wait=wait) for k, v in value.items()}
    return value


def real_gradients(value: Any) -> Any:
    """Return a value with complete gradients in place of wrappers.

    The caller takes their addresses.
    """
    _forget_norms(value)
    return _real(value, wait=True)


# Note [Norms before gradients]
# Clipping by the global norm asks each gradient for its norm and multiplies it by a
# factor. If the overlap knows norms (`halves.py`), neither waits for the gradient.


def _norm(
    _func: Any,
    gradient: Any,
    ord: Any = 2,  # noqa: A002 - as PyTorch's
    dim: Any = None,
    keepdim: Any = False,  # noqa: FBT002
    *,
    dtype: Any = None,
    out: Any = None,
) -> torch.Tensor | None:
    """Return a gradient's norm, or ``None`` if it has to be computed."""
    usual = ord == 2 and dim is None and not keepdim and dtype is None and out is None
    part = getattr(gradient, "part", None)
    if not usual or part is None:
        return None
    found: torch.Tensor | None = part.owner.norm_of(part)
    return found


def _norms(
    func: Any,
    gradients: Any,
    ord: Any = 2,  # noqa: A002
    dtype: Any = None,
) -> list[torch.Tensor] | None:
    """Return the norms of gradients, or ``None`` if they have to be computed."""
    if dtype is not None:
        return None
    found = [
        _norm(func, gradient, ord) if isinstance(gradient, LazyGradient) else None
        for gradient in gradients
    ]
    if all(norm is None for norm in found):
        return None
    return [
        torch.linalg.vector_norm(gradient, ord) if norm is None else norm
        for gradient, norm in zip(gradients, found, strict=True)
    ]


def _is_factor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        plain = not isinstance(value, LazyGradient) and not value.requires_grad
        return plain and value.ndim == 0
    return type(value) in (int, float)


def _scaled(func: Any, gradient: Any, other: Any) -> Any:
    """Multiply a gradient, perhaps later; return ``None`` if it is done as usual."""
    part = getattr(gradient, "part", None)
    if part is None or not _is_factor(other):
        return None
    part.owner.scale(part, func, other)
    return gradient


def _all_scaled(_func: Any, gradients: Any, other: Any) -> Any:
    """Multiply gradients, perhaps later; return ``None`` if it is done as usual."""
    if not _is_factor(other):
        return None
    multiply = torch.Tensor.mul_
    if all(getattr(gradient, "part", None) is None for gradient in gradients):
        return None
    for gradient in gradients:
        if not isinstance(gradient, LazyGradient):
            gradient.mul_(other)
        elif _scaled(multiply, gradient, other) is None:
            _real(gradient, wait=True).mul_(other)
    return gradients


_BY_PARTS: dict[Any, Any] = {
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _norms,  # noqa: SLF001
    torch.Tensor.mul_: _scaled,
    torch._foreach_mul_: _all_scaled,
}

_NAMED = frozenset({"ord", "dim", "keepdim", "dtype", "out", "other"})
"""Arguments of these that may be passed by name."""

_ESCAPES = _getters("data") | {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.share_memory_,
    torch.Tensor.__dlpack__,
    torch.Tensor.set_,
}
"""Reads after which a gradient may be written unseen, so that its norm isn't known."""


def _writes(func: Any) -> bool:
    """Return whether a function writes in place, by its name.

    Versions of tensors don't tell: those of lists are not always increased.
    """
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _forget_norms(value: Any) -> None:
    """Forget the known norms of gradients that may be written unseen."""
    if isinstance(value, LazyGradient):
        part = getattr(value, "part", None)
        if part is not None:
            if value.finish is not None:
                value.finish()
            part.version = None
    elif isinstance(value, list | tuple):
        for item in value:
            _forget_norms(item)
    elif type(value) is dict:
        _forget_norms(tuple(value.values()))


def _show_gradients(values: Any) -> None:
    """Put gradients in place of wrappers for C++, which looks at their memory."""
    for value in values:
        if isinstance(value, LazyGradient) and value.part is not None:
            value.part.owner.show_gradients()
            return


def wrap(
    real: torch.Tensor,
    finish: Callable[[], None],
    member: Any,
    used: LazyGradient | None,
    *,
    by_parts: bool = False,
) -> LazyGradient:
    """Return a wrapper of a gradient; ``used`` again if it fits.

    Call it where classes of tensors are not asked. Sizes of the wrapper only matter to
    ``p.grad = wrapper``: metadata is read from the gradient.
    """
    lazy = used
    if lazy is None or lazy.shape != real.shape:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        lazy = make(
            LazyGradient,
            real.size(),
            strides=real.stride(),
            dtype=real.dtype,
            device=real.device,
            layout=real.layout,
        )
    assert lazy is not None  # noqa: S101
    lazy.target, lazy.finish, lazy.member = real, finish, member
    lazy.part = member if by_parts else None
    return lazy


def is_held(gradient: torch.Tensor, more: int = 0) -> bool:
    """Return whether a program refers to a gradient, besides ``more`` references.

    The caller has it in one variable.
    """
    return sys.getrefcount(gradient) - more > _HELD_ALONE


_count_uses: Any = torch._C._storage_Use_Count  # noqa: SLF001


def uses_of(tensor: torch.Tensor) -> int:
    """Return how many tensors and other owners refer to a tensor's memory."""
    return int(_count_uses(tensor.untyped_storage()._cdata)) - 1  # noqa: SLF001


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether something else may have the memory of this tensor.

    That is another tensor, a process, or an array of which the tensor was made.
    """
    storage = tensor.untyped_storage()
    # One owner is the tensor, and one is this object of its storage.
    return (
        _count_uses(storage._cdata) > 2  # noqa: SLF001
        or not storage.resizable()
        or storage.is_shared()
    )


_count_references: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]  # noqa: SLF001


def references_to(tensor: torch.Tensor) -> int:
    """Return how many owners in C++ and Python refer to a tensor itself."""
    return int(_count_references(tensor))


def _held_alone() -> int:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradient = parameter.grad
    return _count(gradient)


def _count(gradient: torch.Tensor) -> int:
    """Count as in `is_held`."""
    return sys.getrefcount(gradient)


_HELD_ALONE = _held_alone()
