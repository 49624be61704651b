"""What a burst planner chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Each layer's width, and which branches have GPUs of their own."""

    widths: tuple[int, ...]
    """By layer; the position in the problem's widths."""

    own: frozenset[int] = frozenset()
    """First layers of the branches that run beside the others of their block on GPUs of
    their own; the others take turns on the GPUs of the layer before the block."""

    first_gpus: tuple[int, ...] = ()
    """By layer; empty where no branch has GPUs of its own."""
