"""Give each sample a row of its own for a dropout.

# Note [Rows for a dropout]
Masks are drawn for each sample. A forward may drop from a tensor whose first dimension
is not the batch: samples folded with windows or heads, ``(batch * heads, time, time)``,
or time before the batch, ``(time, batch, channels)``. There the graph moves samples to
the front before the dropout and back after it. This takes them for the outer part of
what they are folded with. If they are the inner part, as after ``x.repeat(2, 1)``, the
layers' proof finds that the moved rows mix samples. It also refuses values that are
equal in both orders, which would hide that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from stretto.burst.tracing.comparing import BATCHES, follows
from stretto.burst.tracing.torch_modules import DROPS_ELEMENTS, drops_rows
from stretto.errors import SpecError

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Where a tensor's samples are."""

    side: int
    """The dimension with the samples."""

    each: int
    """How many elements of it each sample has."""

    drops_channels: bool
    """Whether whole channels, the second dimension, are dropped."""


def fold_of(one: Tensor, two: Tensor, dropout: nn.Module) -> Fold | None:
    """Return where samples are, or ``None`` if that is not known or in usual rows.

    Args:
        one: What a dropout returns for the first of `BATCHES`.
        two: The same for the second.
        dropout: The module.
    """
    sides = [follows(v, w) for v, w in zip(one.shape, two.shape, strict=True)]
    if sides.count(False) != len(sides) - 1 or True not in sides:
        return None
    side = sides.index(True)
    each = one.shape[side] // BATCHES[0]
    drops_channels = not isinstance(dropout, DROPS_ELEMENTS)
    if (side, each) == (0, 1) or (drops_channels and (side or one.dim() < 3)):
        return None
    if drops_rows(dropout, one.dim()):
        return None
    return Fold(side=side, each=each, drops_channels=drops_channels)


def by_sample(
    x: Tensor, side: int, each: int, *, drops_channels: bool = False
) -> Tensor:
    """Return a tensor with one row for each sample."""
    moved = x.movedim(side, 0)
    count, rest = moved.shape[0] // each, moved.shape[1:]
    if drops_channels:  # those of all rows of a sample
        return moved.reshape(count, each * rest[0], *rest[1:])
    return moved.reshape(count, each, *rest)


def as_before(
    x: Tensor,
    side: int,
    each: int,
    *,
    drops_channels: bool = False,
    is_contiguous: bool = False,
) -> Tensor:
    """Undo `by_sample`."""
    size, *rest = x.shape[1:]
    if drops_channels:
        rest = [size // each, *rest]
    moved = x.reshape(x.shape[0] * each, *rest).movedim(0, side)
    return moved.contiguous() if is_contiguous else moved


def not_outside(place: str) -> SpecError:
    """Return the error of a dropout of samples that may be an inner part."""
    return SpecError(
        f"{place}: drops from samples that are folded with another dimension and are "
        "not its outer part, or whose values do not show it: masks are drawn for each "
        "sample. Fold them as (batch, other), or drop before they are folded"
    )


def require_rows(
    given: Any, batch: int, place: str, within: nn.Module | None = None
) -> None:
    """Refuse a dropout of a tensor that has no row for each sample.

    Args:
        given: What the dropout gets.
        batch: The number of samples.
        place: Its line.
        within: The module of torch that runs it, if one does.
    """
    if not isinstance(given, Tensor) or given.shape[:1] == (batch,):
        return
    raise SpecError(
        f"{place}: drops from a tensor of shape {tuple(given.shape)} where the batch "
        f"has {batch} samples: masks are drawn for each sample, so the first dimension "
        f"must be the batch. {_way_of(within)}"
    )


def _way_of(module: nn.Module | None) -> str:
    """Return what to do about a dropout that a module runs, or that is in it."""
    kind = type(module).__name__
    for part in module.modules() if module is not None else ():
        if getattr(part, "batch_first", True) is False:
            return (
                f"Create {kind} with batch_first=True, and give it tensors that begin "
                "with the batch"
            )
    if getattr(module, "inplace", False):
        return (
            f"Create {kind} with inplace=False, which allows another dimension to be "
            "the batch, or drop before the dimensions change"
        )
    return (
        "Drop from such a tensor, and not from parameters; outside of torch's own "
        "modules, and not in place, another dimension may be the batch"
    )
