"""Compare recordings of two batches to find sizes that follow the batch.

# Note [Numbers of samples]
A forward may branch on the number of samples. A capture holds for the numbers with
which it was recorded. These are two at construction, chosen to reveal a limit between
them or a test for even numbers. Each further number of samples of a global batch is
recorded when it first occurs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from stretto.burst.tracing.aligning import FROM_CALL, aligned, differs
from stretto.burst.tracing.records import Fixed, Record, Recording, Ref, names_in
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCHES = (7, 1008)
"""Two numbers of samples: a difference in this ratio follows the batch."""

_SHAPING = {
    "affine_grid",
    "arange",
    "broadcast_to",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "empty",
    "expand",
    "full",
    "group_norm",
    "narrow",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "rand",
    "randint",
    "randn",
    "repeat",
    "repeat_interleave",
    "tile",
    "reshape",
    "split",
    "unflatten",
    "view",
    "viewed",
    "written_through",
    "zeros",
    "normal",
}
"""Functions in which a number that follows the batch can be a size, or a number of
groups."""


@final
@dataclass(frozen=True)
class BatchCount:
    """A number that follows the batch."""

    each: int
    """For one sample."""


def compare(
    first: Recording, second: Recording, batches: tuple[int, int] | None
) -> list[Any]:
    """Return each record's arguments, with `BatchCount` for numbers of the batch.

    The recordings are `aligned`. ``batches`` are their numbers of samples, ``None`` if
    they are the same.

    Raises:
        SpecError: the recordings differ in anything else.
    """
    found = []
    for one, two in zip(first.records, second.records, strict=True):
        found.append(
            (
                _joined(one.args, two.args, one, batches),
                _joined(one.kwargs, two.kwargs, one, batches),
            )
        )
    if first.output != second.output:
        raise differs(first.records[-1], batches)
    _require_constants(first, second, batches)
    return found


def _require_constants(
    first: Recording, second: Recording, batches: tuple[int, int] | None
) -> None:
    """Require that tensors made by constructors have the same values in both."""
    for record in first.records:
        for name in names_in((record.args, record.kwargs)):
            one = first.constants.get(name)
            two = second.constants.get(name)
            if one is two or not isinstance(one, Tensor):
                continue
            if not isinstance(two, Tensor) or not is_equal(one, two):
                raise differs(record, batches)


def is_equal(one: Tensor, two: Tensor) -> bool:
    """Return whether tensors have the same shape, type and values."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return bool(torch.allclose(one, two, rtol=0.0, atol=0.0, equal_nan=True))


def _joined(
    one: Any,
    two: Any,
    at: Record,
    batches: tuple[int, int] | None,
    *,
    is_end: bool = False,
) -> Any:
    if isinstance(one, (Ref, Fixed)) or isinstance(two, (Ref, Fixed)):
        if one != two:
            raise differs(at, batches)
        return one
    if isinstance(one, np.generic) or isinstance(two, np.generic):
        found = _joined(_plain(one), _plain(two), at, batches, is_end=is_end)
        return found if isinstance(found, BatchCount) else one
    if type(one) is not type(two):
        raise differs(at, batches)
    if isinstance(one, (tuple, list)):
        if len(one) != len(two):
            raise differs(at, batches)
        parts = [_joined(a, b, at, batches) for a, b in zip(one, two, strict=True)]
        if hasattr(one, "_fields"):
            return type(one)(*parts)
        # A torch.Size accepts only numbers.
        return tuple(parts) if isinstance(one, torch.Size) else type(one)(parts)
    if isinstance(one, dict):
        if list(one) != list(two):
            raise differs(at, batches)
        return {k: _joined(v, two[k], at, batches) for k, v in one.items()}
    if isinstance(one, slice):
        return slice(
            *(
                _joined(getattr(one, e), getattr(two, e), at, batches, is_end=True)
                for e in ("start", "stop", "step")
            )
        )
    if isinstance(one, (int, float, complex, str, bool)):
        return _number(one, two, at, batches, is_end=is_end)
    return one


def _plain(value: Any) -> Any:
    """Return NumPy's number as Python's; of NumPy's, types depend on the values."""
    return value.item() if isinstance(value, np.generic) else value


def _number(
    one: Any,
    two: Any,
    at: Record,
    batches: tuple[int, int] | None,
    *,
    is_end: bool,
) -> Any:
    if one == two or (one != one and two != two):
        return one
    if batches is None:
        raise differs(at, batches)
    if isinstance(one, bool) or not isinstance(one, int):
        raise SpecError(
            f"{at.place}: uses the number of samples as a number ({one} for "
            f"{batches[0]} samples, {two} for {batches[1]}), which mixes samples: it "
            "differs on each rank. Leave what depends on the batch to the loss"
        )
    if one * batches[1] != two * batches[0] or one % batches[0]:
        raise SpecError(
            f"{at.place}: a size follows the number of samples, but not as a multiple "
            "of it: a layer must compute each sample in the same way for any number"
        )
    name = str(getattr(at.target, "__name__", at.target))
    if name not in _SHAPING and not (is_end and name == "__getitem__"):
        raise SpecError(
            f"{at.place}: {name} uses the number of samples as a number, which mixes "
            "samples: it differs on each rank. Leave what depends on the batch to "
            "the loss"
        )
    return BatchCount(one // batches[0])


def follows(one: int, two: int, batches: tuple[int, int] = BATCHES) -> bool | None:
    """Return whether a number follows the batch; ``None``: it does, in no ratio."""
    if one == two:
        return False
    if one * batches[1] == two * batches[0]:
        return one % batches[0] == 0 or None
    return None


@final
class Counts:
    """The numbers of samples for which a forward is known to do the same."""

    def __init__(
        self,
        first: Recording,
        other: Recording,
        ways: Sequence[Callable[[int], Recording]],
    ) -> None:
        """Prepare; ``ways`` record it again, with caches in one state or another."""
        self._known = dict(zip(BATCHES, (first, other), strict=True))
        self._seen = set(BATCHES)
        self._ways = ways

    def require(self, count: int) -> None:
        """Record the forward of another number of samples if it is due.

        Raises:
            SpecError: it does something else than for those of the capture.
        """
        if count in self._seen:
            return
        for way in self._ways[:-1]:
            with contextlib.suppress(SpecError):
                self._compare(way, count)
                return
        self._compare(self._ways[-1], count)

    def difference(self) -> str | None:
        """Return the first line that forward no longer runs as it did, or None.

        It is recorded again with the first number of samples of the capture.

        Raises:
            SpecError: it can't be recorded now.
        """
        place = None
        for way in self._ways:
            found = way(BATCHES[0])
            try:
                compare(*aligned(self._known[BATCHES[0]], found, None), None)
            except SpecError as exc:
                place = str(exc).partition(FROM_CALL)[0]
            else:
                return None
        return place

    def _compare(self, again: Callable[[int], Recording], count: int) -> None:
        found = again(count)
        for size, known in self._known.items():
            both = aligned(known, found, (size, count))
            compare(*both, (size, count))
            for one, two in zip(both[0].records, both[1].records, strict=True):
                _require_shapes(one, two, (size, count))
        self._seen.add(count)


def _require_shapes(one: Record, two: Record, batches: tuple[int, int]) -> None:
    for path, tensor in one.tensors.items():
        other = two.tensors[path]
        sides = zip(tensor.shape, other.shape, strict=False)
        if tensor.dim() != other.dim() or any(
            follows(v, w, batches) is None for v, w in sides
        ):
            if batches[1] == 1 and other.shape == tensor.shape[1:]:
                raise SpecError(
                    f"{one.place}: gives {tuple(tensor.shape)} for {batches[0]} "
                    f"samples and {tuple(other.shape)} for 1, which has no row for "
                    "the sample: squeeze() without a dimension drops that of the "
                    "batch, too. Name the dimension to drop, as in squeeze(-1)"
                )
            raise SpecError(
                f"{one.place}: gives {tuple(tensor.shape)} for {batches[0]} samples "
                f"and {tuple(other.shape)} for {batches[1]}, which is not a multiple: "
                "it treats some samples differently from others, and these may be on "
                "other ranks. Treat all samples the same"
            )
