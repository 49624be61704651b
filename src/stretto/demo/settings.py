"""Options of a demo, as the command passes them to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from stretto.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

MODELS = ("convnet", "transformer")

HEADS = 5
"""Attention heads of the transformer, which share its width equally."""

LARGEST_SEED = 2**32 - 1

BUCKET_SIZES_MIB: tuple[float | None, ...] = (None, 10.0, 5.0, 2.0, 1.0)
"""DDP's default (1 MiB, then 25 MiB) and four others; the best of them is a method."""


def size_label(size_mib: float | None) -> str:
    """Return a bucket size in words."""
    return "default" if size_mib is None else f"{size_mib:g} MiB"


class Exchanged:
    """A file that the command and the ranks exchange."""

    __slots__ = ()

    def save(self, path: Path) -> None:
        """Write it."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return what `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings(Exchanged):
    """Options of one demo."""

    out: str
    """Existing folder for the results."""

    model: str = "convnet"

    batch_per_rank: int = 32

    width: int | None = None
    """The model's width; ``None``: its default."""

    steps: int = 24
    """Training steps of every method."""

    screening_steps: int = 4
    """Steps that find the best of DDP's bucket sizes."""

    screening_warmup: int = 2
    """Steps of each size before those; DDP rebuilds its buckets in the second."""

    profile_steps: int = 12

    probe_budget_s: float = 20.0

    seed: int = 0

    learning_rate: float = 0.02

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise SpecError(
                f"model must be one of {', '.join(MODELS)}, got {self.model!r}"
            )
        for name in ("batch_per_rank", "screening_steps", "profile_steps"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be >= 1, got {getattr(self, name)}")
        parts = HEADS if self.model == "transformer" else 1
        if self.width is not None and (self.width < 1 or self.width % parts):
            multiple = f" and a multiple of {parts}" if parts > 1 else ""
            raise SpecError(f"width must be >= 1{multiple}, got {self.width}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SpecError(f"seed must be 0 to {LARGEST_SEED}, got {self.seed}")
        if self.steps < 6:
            raise SpecError(f"steps must be >= 6, with 2 as warm-up, got {self.steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOutcome:
    """Results of one method's training."""

    name: str
    description: str
    steps_s: list[float]
    losses: list[float]
    predicted_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome(Exchanged):
    """Results of the ranks: written by rank 0, read by the command."""

    methods: list[MethodOutcome]
    bucket_sizes_s: dict[str, float]
    """Median step time of DDP by label of the bucket size, from the screening."""
    gradient_difference: float
    """Largest difference of stretto's gradients from DDP's after one backward on the
    same batch, relative to the largest gradient of each tensor."""
    bound_s: float
    bound_scope: str
    """The plans that the bound covers, in words that continue "no plan with"."""
    parameters: int
    ranks: int
    environment: dict[str, str]
