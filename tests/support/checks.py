"""What ranks report of a log, of an error, and of gradients that differ."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Lines(logging.Handler):
    """Keeps what a logger of stretto logs from now on, at `level` and above."""

    def __init__(self, level: int = logging.INFO, name: str = "stretto") -> None:
        super().__init__(level)
        self.lines: list[str] = []
        logger = logging.getLogger(name)
        logger.addHandler(self)
        logger.setLevel(min(level, logger.getEffectiveLevel()))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The name and the message of the `StrettoError` that a call raises."""
    try:
        function(*args, **kwargs)
    except StrettoError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def differing_steps(
    ours: Sequence[Sequence[torch.Tensor | None]],
    theirs: Sequence[Sequence[torch.Tensor | None]],
) -> list[int]:
    """The steps in which not every gradient is equal bit for bit, or both missing."""
    return [
        step
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True))
        if any(
            (a is None) != (b is None)
            or (a is not None and b is not None and not torch.equal(a, b))
            for a, b in zip(left, right, strict=True)
        )
    ]
