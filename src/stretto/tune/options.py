"""Options of tuning; all have a default."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from stretto.boolean_options import bool_option
from stretto.errors import SpecError
from stretto.tune.techniques import AbstractTechnique, technique_of
from stretto.tune.techniques.aiacc import EXPLORATION, WINDOW
from stretto.tune.trial import SearchLimits

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

    techniques: tuple[str | type[AbstractTechnique], ...] = GUIDED
    """Techniques that propose plans; a bandit chooses among them. Each is the name of
    one of stretto's or of an installed package's, or a class."""

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

    plan_cache: bool = True
    """Whether settled plans are kept for the next run (path: `STRETTO_PLAN_CACHE`)."""

    seed: int = 0
    """Random seed of the techniques that sample."""

    memory: InitVar[bool | None] = None
    """The former name of ``plan_cache``."""

    def __post_init__(self, memory: bool | None) -> None:
        if memory is not None:
            object.__setattr__(self, "plan_cache", bool_option("memory", memory))
        for name in ("model", "watch", "plan_cache"):
            value = bool_option(name, getattr(self, name))
            object.__setattr__(self, name, value)  # ranks compare the text of all
        if self.steps < 0:
            raise SpecError(f"steps must be >= 0, got {self.steps}", place=".steps")
        _ = self.limits  # which checks lost_ratio and patience
        names: list[str] = []
        for i, each in enumerate(self.techniques):
            place = f".techniques[{i}]"
            kind = technique_of(each, place=place)
            if kind.name in names:
                raise SpecError(
                    f"techniques must be different, got {kind.name!r} twice",
                    place=place,
                )
            if kind.needs_model and not self.model:
                raise SpecError(
                    f"technique {kind.name!r} needs model=True: it ranks by the fitted "
                    "model",
                    place=place,
                )
            names.append(kind.name)

    @property
    def limits(self) -> SearchLimits:
        """The limits of the search."""
        return SearchLimits(
            steps=max(1, self.steps),
            lost_ratio=self.lost_ratio,
            patience=self.patience,
        )
