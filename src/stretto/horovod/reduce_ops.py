"""Reductions of ranks' values."""

from __future__ import annotations

import enum
import sys
import warnings

from stretto.runtime.negotiated import Op

_PACKAGE = "stretto.horovod."


class ReduceOp(enum.IntEnum):
    """Horovod's reductions, with its numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

ENGINE_OPS = {
    Average: Op.AVERAGE,
    Sum: Op.SUM,
    Min: Op.MIN,
    Max: Op.MAX,
    Product: Op.PRODUCT,
}


def reduction_of(op: ReduceOp | None, average: bool | None) -> ReduceOp:  # noqa: FBT001
    """Return the reduction for ``op`` and the older ``average``.

    Raises:
        ValueError: both are given, or ``op`` is not a reduction.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                f"op replaces average: pass only one of them, got op={op!r} "
                f"and average={average!r}"
            )
        return ReduceOp(op)
    if average is None:
        return Average
    warnings.warn(
        "average= is replaced by op=: use op=hvd.Average or op=hvd.Sum",
        DeprecationWarning,
        stacklevel=_caller_level(),
    )
    return Average if average else Sum


def _caller_level() -> int:
    """Return the number of frames to the first caller outside of this package."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001
    while frame.f_back and frame.f_globals["__name__"].startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def require_no_adasum(op: ReduceOp, what: str) -> None:
    """Raise if ``op`` is Adasum.

    Raises:
        NotImplementedError: ``op`` is Adasum; the message names an alternative.
    """
    if op is Adasum:
        raise NotImplementedError(
            f"{what} with op=Adasum is not provided. Use op=hvd.Average and scale the "
            "learning rate with the number of ranks, warming it up over the first "
            "epochs."
        )
