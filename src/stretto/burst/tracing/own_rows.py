"""Check at each step that a computed index stays within each sample's rows.

# Note [Computed places]
``h.flatten(0, 1)[first + best]`` reads one word of each sample by its place among the
words of all. It keeps samples apart as long as ``best`` is the place of one of the
sample's own words, and reads another sample's word otherwise. On a rank there would be
another one at that place. Which it is depends on values, so layers check the index each
time. An index that is computed from nothing but sizes and constants needs no check:
the layers' proof shows its effect.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, final

import torch

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@final
class OtherRows(SpecError):
    """An index reads or writes rows of other samples."""


_is_off = False


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Let computed indexes read any rows, to see whether it makes a difference."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def own_rows(index: Tensor, side: int, here: int, there: int, place: str) -> Tensor:
    """Return an index into the samples' rows, after checking it.

    Args:
        index: places in a dimension with ``there`` rows for each sample.
        side: the dimension of ``index`` with ``here`` rows for each sample.
        here: see ``side``.
        there: see ``index``.
        place: the line in the user's code.

    Raises:
        OtherRows: a place is not one of the sample's own.
    """
    if _is_off or not index.numel():
        return index
    count = index.shape[side] // here
    rows = index.detach().movedim(side, 0).reshape(count, -1)
    samples = torch.arange(count, device=index.device)[:, None]
    # Places below zero count from the end.
    if not bool(((rows % (count * there)) // there == samples).all()):
        raise OtherRows(
            f"{place}: an index into the rows of the batch is computed, and now some "
            "samples read or write rows of others, which may be on other ranks. Keep "
            "the index within each sample's own rows, for example by clamp() before "
            "the sample's position is added"
        )
    return index
