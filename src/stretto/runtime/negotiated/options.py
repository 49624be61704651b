"""Settings of a negotiated engine."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of an engine, equal on all its ranks.

    Raises:
        SpecError: a value breaks its rule.
    """

    lanes: int = 4
    """Communicators that transfer units concurrently. Where one TCP flow fills about a
    third of a link, as on many clouds, four fill it; elsewhere they cost little.
    """

    unit_bytes: int = 4 * 2**20
    """Small tensors are packed up to this size; larger ones are cut into such parts."""

    cycle_s: float = 0.001
    """Least time between two rounds: lets small tensors accumulate while busy."""

    stall_s: float = 60.0
    """A request that waits this long for other ranks is logged in a warning."""

    known_requests: int = 1024
    """Number of names outside tensor sets whose description is cached."""

    stable_steps: int = 3
    """Steps of a tensor set in one order before that order is kept; 0 disables it."""

    def __post_init__(self) -> None:
        for name in ("lanes", "unit_bytes", "known_requests"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("cycle_s", "stable_steps"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.stall_s <= 0:
            raise SpecError(f"stall_s must be > 0, got {self.stall_s:g}")
