"""Reject code of the user's that asks which memory or object a tensor is."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from stretto.burst.tracing.freezing import is_users_frame
from stretto.burst.tracing.source_lines import source_line
from stretto.errors import SpecError

_NAMES = {
    getattr(Tensor, name): name
    for name in (
        *("data_ptr", "const_data_ptr", "mutable_data_ptr"),
        *("untyped_storage", "storage", "is_set_to"),
    )
    if hasattr(Tensor, name)  # some are in later versions of PyTorch only
} | {
    getattr(Tensor, name).__get__: name
    for name in ("_cdata", "_version", "__cuda_array_interface__")
}
"""Functions and properties that differ between tensors of equal values."""

_METHODS_OF = ("torch.overrides", "torch._tensor")
"""Modules of PyTorch through which a tensor's methods are called."""


def refuse_address(func: Any) -> None:
    """Reject a call by the user's code of a function that shows which tensor one is.

    To be called by ``__torch_function__`` of a mode.

    Raises:
        SpecError: it is one; the message names the line.
    """
    name = _NAMES.get(func)
    if name is None:
        return
    if not is_users_frame(sys._getframe(2), _METHODS_OF):  # noqa: SLF001
        return
    raise SpecError(
        f"{source_line()}: reads {name} of a tensor, which is another when "
        "layers run with other tensors or on other ranks: compare names instead, or "
        "decide in __init__"
    )
