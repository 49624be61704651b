"""Refuse code of the user's that asks which memory or object a tensor is.

Or whether inference mode is on, which layers can't know either.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.burst.tracing.freezing import is_users_frame
from stretto.burst.tracing.source_lines import source_line
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_NAMES = {
    getattr(Tensor, name): name
    for name in (
        *("data_ptr", "const_data_ptr", "mutable_data_ptr"),
        *("untyped_storage", "storage", "is_set_to"),
        *("is_shared", "is_pinned", "_is_view"),
    )
    if hasattr(Tensor, name)  # some are in later versions of PyTorch only
} | {
    getattr(Tensor, name).__get__: name
    for name in (
        *("_cdata", "_version", "__cuda_array_interface__"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
    )
}
"""Functions and properties that differ between tensors of equal values."""

_READS_INFERENCE = (
    "{}: asks for inference mode, which layers can't know: ask self.training or "
    "torch.is_grad_enabled(), which are recorded, or decide outside of the model"
)

_METHODS_OF = ("torch.overrides", "torch._tensor")
"""Modules of PyTorch through which a tensor's methods are called."""


def refuse_address(func: Any) -> None:
    """Refuse a call by the user's code of a function that shows which tensor one is.

    To be called by ``__torch_function__`` of a mode.

    Raises:
        SpecError: it is one; the message names the line.
    """
    name = _NAMES.get(func)
    is_asked = func is Tensor.is_inference
    if name is None and not is_asked:
        return
    if not is_users_frame(sys._getframe(2), _METHODS_OF):  # noqa: SLF001
        return
    if is_asked:
        raise SpecError(_READS_INFERENCE.format(source_line()))
    raise SpecError(
        f"{source_line()}: reads {name} of a tensor, which is another when "
        "layers run with other tensors or on other ranks: compare names instead, or "
        "decide in __init__"
    )


@contextlib.contextmanager
def identities_refused(inputs: Collection[int]) -> Iterator[None]:
    """Refuse code of the user's that asks for the ``id`` or the hash of an input.

    A program may keep such a number and compare it in a later step. Layers compute with
    other tensors, whose numbers it can't know.

    Args:
        inputs: ids of the tensors with which the model is called; it may grow.
    """
    given: Any = builtins
    real, thread = builtins.id, threading.get_ident()

    def asked(value: object, /) -> int:
        number = real(value)
        if (
            number in inputs
            and threading.get_ident() == thread
            and is_users_frame(sys._getframe(1), ("torch._tensor",))  # noqa: SLF001
        ):
            raise SpecError(
                f"{source_line()}: reads the id or the hash of an input, which is "
                "another tensor when layers run: decide outside of the model, and pass "
                "the result as an argument or an attribute"
            )
        return number

    given.id = asked
    try:
        with _inference_unread(thread):
            yield
    finally:
        given.id = real


@contextlib.contextmanager
def _inference_unread(thread: int) -> Iterator[None]:
    """Refuse code of the user's that asks whether inference mode is on.

    Models are recorded outside of it, where tensors may be kept.
    """
    library: Any = torch
    real = library.is_inference_mode_enabled

    def asked() -> bool:
        if threading.get_ident() == thread and is_users_frame(sys._getframe(1)):  # noqa: SLF001
            raise SpecError(_READS_INFERENCE.format(source_line()))
        return bool(real())

    library.is_inference_mode_enabled = asked
    try:
        yield
    finally:
        library.is_inference_mode_enabled = real
