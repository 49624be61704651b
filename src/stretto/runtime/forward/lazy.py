"""Gradients of buckets whose communication has not finished.

# Note [A wrapper in place of the gradient]
After a backward, ``p.grad`` of an unfinished bucket is a `LazyGradient`: a tensor
without memory. Whatever reads or writes it first settles all buckets, which puts the
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
    """The gradient itself, which is complete once all buckets are settled."""

    settle: Callable[[], None] | None
    """Settles all buckets; ``None`` once they are."""

    member: Any
    """The parameter in its bucket; ``None`` once its bucket is settled."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Settle, then call ``func`` with the real gradients."""
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
        """Settle, then run an operator on the real gradients."""
        named = {k: _real(v, wait=True) for k, v in (kwargs or {}).items()}
        return func(*(_real(value, wait=True) for value in args), **named)


def _real(value: Any, *, wait: bool) -> Any:
    """Return a value with the real gradient in place of each wrapper."""
    if isinstance(value, LazyGradient):
        if wait and value.settle is not None:
            value.settle()
        return value.target
    if type(value) in (list, tuple):
        return type(value)(_real(v, wait=wait) for v in value)
    if type(value) is dict:
        return {k: _real(v, wait=wait) for k, v in value.items()}
    return value


def real_gradients(value: Any) -> Any:
    """Return a value with complete gradients in place of wrappers."""
    return _real(value, wait=True)


def wrap(
    real: torch.Tensor,
    settle: Callable[[], None],
    member: Any,
    used: LazyGradient | None,
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
    lazy.target, lazy.settle, lazy.member = real, settle, member
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
