"""Options of tuning; all have a default."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import SpecError
from stretto.tune.techniques.aiacc import EXPLORATION, WINDOW
from stretto.tune.trial import Limits

TECHNIQUES = (
    "predicted",
    "coordinate",
    "grid",
    "population",
    "bayes",
    "hyperband",
)

GUIDED = ("predicted", "coordinate")
"""The default: the fitted model's ranking first, then neighbors of the best."""

ENSEMBLE = ("grid", "population", "bayes", "hyperband")
"""AIACC-Training's ensemble, which uses no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options for the search of ``plan="auto"`` during training."""

    steps: int = 100
    """Steps in which plans may be proposed; the deciding comparison with DDP's buckets
    may follow. 0 keeps the first plan."""

    lost_ratio: float = 0.015
    """Time that trials may lose, as a share of the time trained, including changes of
    plan and corrections of the model. Half of the budget for ``steps`` steps may be
    lost at once; the rest is earned step by step."""

    techniques: tuple[str, ...] = GUIDED
    """Techniques that propose plans; a bandit chooses among them."""

    model: bool = True
    """Whether the planner's plan comes first and predictions rule plans out. If false,
    the search starts from DDP's rule and the techniques get no predictions."""

    patience: int | None = 6
    """Consecutive trials without improvement before the search ends; ``None`` means no
    limit, which a search without the model needs."""

    window: int = WINDOW
    """Uses of techniques that the bandit remembers."""

    exploration: float = EXPLORATION
    """AIACC's C."""

    watch: bool = True
    """Whether to watch step times after settling, and to reopen the search on a lasting
    change."""

    memory: bool = True
    """Whether settled plans are stored for the next run (path: `STRETTO_MEMORY`)."""

    seed: int = 0
    """Random seed of the techniques that sample."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise SpecError(f"steps must be >= 0, got {self.steps}", place=".steps")
        _ = self.limits  # which checks lost_ratio and patience
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
        """The limits of the search."""
        return Limits(
            steps=max(1, self.steps),
            lost_ratio=self.lost_ratio,
            patience=self.patience,
        )
