"""Find the line of forward whose backward fails: PyTorch's own error names none."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stretto.burst.tracing.replaced import own_function
from stretto.burst.tracing.source_lines import is_user, source_line

if TYPE_CHECKING:
    from collections.abc import Callable

_CHANGED = re.compile(
    r"modified by an inplace operation: \[\S+ \[(?P<shape>[\d, ]*)\]\]"
    r"(?:, which is output \d+ of (?P<made_by>[\w:]+),)? is at version (?P<version>\d+)"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)


def line_in_backward(call: Callable[[], object]) -> str:
    """Return the line that makes backward fail, or an empty text.

    A write in place is named if backward needs the value before it; otherwise the
    operation whose backward fails.

    Args:
        call: is made once more, forward and backward, which is slow.
    """
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.set_detect_anomaly(mode=True, check_nan=False),
        _Writes() as writes,
    ):
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the one that is looked for
            text = str(error)
        else:
            return ""
    frames = [
        f"{file}:{number}"
        for warning in caught
        for file, number in _FRAME.findall(str(warning.message))
        if is_user(file)
    ]
    return writes.line_of(text) or (frames[-1] if frames else "")


class _Write(NamedTuple):
    line: str

    shapes: tuple[list[int], list[int]]
    """Shapes of the tensor that is written, and of the one that it is a view of."""

    made_by: str
    """The operation that made the tensor, as PyTorch's error says it."""

    version: int
    """The number of writes so far."""


@final
class _Writes(TorchFunctionMode):
    """Records which lines write in place into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[_Write] = []
        self._alive: list[Tensor] = []
        self._made_by: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = own_function(func)
        given = [
            (x, _version_of(x), _maker_of(_whole(x)))
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and not x.is_inference()
        ]
        result = func(*args, **(kwargs or {}))
        for tensor, before, maker in given:
            version, whole = _version_of(tensor), _whole(tensor)
            if version != before:
                self._alive.append(whole)  # no other one gets its id
                made_by = self._made_by.setdefault(id(whole), maker)
                shapes = list(tensor.shape), list(whole.shape)
                self._found.append(_Write(source_line(), shapes, made_by, version))
        return result

    def line_of(self, text: str) -> str:
        """Return the line of the write that an error reports, if it reports one."""
        reported = _CHANGED.search(text)
        if reported is None:
            return ""
        shape = [int(size) for size in reported["shape"].split(",") if size.strip()]
        last = [
            one
            for one in self._found
            if one.version == int(reported["version"]) and shape in one.shapes
        ]
        made_by = reported["made_by"] or ""
        same = [one for one in last if one.made_by.startswith(made_by)] or last
        return same[-1].line if same else ""


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor that a view shows a part of, or itself."""
    return tensor if tensor._base is None else tensor._base  # noqa: SLF001


def _version_of(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - PyTorch's error shows it


def _maker_of(tensor: Tensor) -> str:
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()
