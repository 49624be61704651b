"""Measure, plan and apply plans while a training run is under way."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.tune.controller import AutoPlan
    from stretto.tune.initial_profile import DeferredProfile, deferred_plan
    from stretto.tune.options import ENSEMBLE, GUIDED, TuneOptions
    from stretto.tune.plan_cache import PlanMemory
    from stretto.tune.result import OnSettled, TuningResult, summary
    from stretto.tune.techniques import AbstractTechnique, Proposal, SearchContext

__all__ = [
    "ENSEMBLE",
    "GUIDED",
    "AbstractTechnique",
    "AutoPlan",
    "DeferredProfile",
    "OnSettled",
    "PlanMemory",
    "Proposal",
    "SearchContext",
    "TuneOptions",
    "TuningResult",
    "deferred_plan",
    "summary",
]

_HOMES = {
    "AbstractTechnique": "techniques",
    "AutoPlan": "controller",
    "DeferredProfile": "initial_profile",
    "ENSEMBLE": "options",
    "GUIDED": "options",
    "OnSettled": "result",
    "PlanMemory": "plan_cache",
    "Proposal": "techniques",
    "SearchContext": "techniques",
    "TuningResult": "result",
    "TuneOptions": "options",
    "deferred_plan": "initial_profile",
    "summary": "result",
}


def __getattr__(name: str) -> Any:
    """Import a name's module on first access: lists of plans need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.tune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stretto.tune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
