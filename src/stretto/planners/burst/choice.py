"""The decision of a burst planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Each layer's width, and the branches that run on their own GPUs."""

    widths: tuple[int, ...]
    """By layer; the position in the problem's widths."""

    own: frozenset[int] = frozenset()
    """First layers of the branches that run on their own GPUs, beside the others of
    their block; the others take turns on the GPUs of the layer before the block."""

    first_gpus: tuple[int, ...] = ()
    """By layer; empty if no branch has its own GPUs."""
