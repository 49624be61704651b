"""What a user may say about tuning; all of it has a default."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.errors import SpecError
from stretto.tune.bandit import EXPLORATION, WINDOW
from stretto.tune.search import Limits

TECHNIQUES = (
    "predicted",
    "coordinate",
    "grid",
    "population",
    "bayes",
    "hyperband",
)

GUIDED = ("predicted", "coordinate")
"""The default: what the fitted model ranks first, then its neighbours."""

ENSEMBLE = ("grid", "population", "bayes", "hyperband")
"""AIACC-Training's ensemble, which knows no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How ``plan="auto"`` searches while the training runs."""

    steps: int = 100
    """Steps in which plans may be proposed; the comparison with DDP's buckets that
    decides may follow. 0: the first plan stays."""

    lost_ratio: float = 0.015
    """Time that trials may lose, changes of plan and corrections of the model included,
    as a share of the time trained. Half of what ``steps`` steps allow may be lost at
    once, the rest is earned step by step."""

    techniques: tuple[str, ...] = GUIDED
    """Who proposes plans, chosen among by a bandit."""

    model: bool = True
    """Whether the planner's plan comes first and predictions rule plans out; without,
    the search starts from DDP's rule and the techniques know nothing."""

    patience: int | None = 6
    """Trials in a row that bring nothing before the search ends; ``None``: any number,
    which a search without the model needs."""

    window: int = WINDOW
    """Uses of techniques that the bandit remembers."""

    exploration: float = EXPLORATION
    """AIACC's C."""

    watch: bool = True
    """Whether step times are watched after settling, and a lasting change re-opens the
    search."""

    memory: bool = True
    """Whether settled plans are kept for the next run (`STRETTO_MEMORY` says where)."""

    seed: int = 0
    """Of techniques that draw."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise SpecError(f"steps must be >= 0, got {self.steps}", place=".steps")
        if not (math.isfinite(self.lost_ratio) and self.lost_ratio >= 0):
            raise SpecError(
                f"lost_ratio must be >= 0, got {self.lost_ratio}", place=".lost_ratio"
            )
        if self.patience is not None and self.patience < 1:
            raise SpecError(
                f"patience must be >= 1, got {self.patience}", place=".patience"
            )
        for i, name in enumerate(self.techniques):
            if name not in TECHNIQUES or name in self.techniques[:i]:
                raise SpecError(
                    f"techniques must be different ones of {', '.join(TECHNIQUES)}, "
                    f"got {name!r}",
                    place=f".techniques[{i}]",
                )
        if not self.model and "predicted" in self.techniques:
            raise SpecError(
                "technique 'predicted' needs model=True: it ranks by the fitted model",
                place=".techniques",
            )

    @property
    def limits(self) -> Limits:
        """The search's limits."""
        return Limits(
            steps=max(1, self.steps),
            lost_ratio=self.lost_ratio,
            patience=self.patience,
        )
