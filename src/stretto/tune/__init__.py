"""Measure, plan and apply plans while a training run is under way.

- `controller` runs the phases, and `tuning_meeting` lets ranks meet. `initial_profile`
  measures (`evaluations` leaves out steps with validation), `online_search` tries plans
  on real steps, `drift_detector` watches. `forced` is a fixed schedule for tests.
- `forward_plans` decides whether plans may overlap with forward.
- `search` decides what is tried (`trial`, `starts`, `search_space`), `paired` compares
  two plans, `calibration` corrects the model, and `techniques` propose.
- `plan_cache` stores plans, `job_similarity` finds those of similar jobs,
  `cached_plans` uses them, and `tuning_state` saves a run that ends early.
- `options`, `result` and `artifacts` are what a user passes and gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.tune.controller import AutoPlan
    from stretto.tune.initial_profile import DeferredProfile, deferred_plan
    from stretto.tune.options import ENSEMBLE, GUIDED, TuneOptions
    from stretto.tune.plan_cache import PlanCache, PlanMemory
    from stretto.tune.result import OnSettled, TuningResult, summary
    from stretto.tune.techniques import AbstractTechnique, Proposal, SearchContext

__all__ = [
    "ENSEMBLE",
    "GUIDED",
    "AbstractTechnique",
    "AutoPlan",
    "DeferredProfile",
    "OnSettled",
    "PlanCache",
    "PlanMemory",
    "Proposal",
    "SearchContext",
    "TuneOptions",
    "TuningResult",
    "deferred_plan",
    "summary",
]

_HOMES = {
    "AbstractTechnique": "stretto.tune.techniques",
    "AutoPlan": "stretto.tune.controller",
    "DeferredProfile": "stretto.tune.initial_profile",
    "ENSEMBLE": "stretto.tune.options",
    "GUIDED": "stretto.tune.options",
    "OnSettled": "stretto.tune.result",
    "PlanCache": "stretto.tune.plan_cache",
    "PlanMemory": "stretto.tune.plan_cache",
    "Proposal": "stretto.tune.techniques",
    "SearchContext": "stretto.tune.techniques",
    "TuningResult": "stretto.tune.result",
    "TuneOptions": "stretto.tune.options",
    "deferred_plan": "stretto.tune.initial_profile",
    "summary": "stretto.tune.result",
}


__getattr__ = lazy_names("stretto.tune", _HOMES)  # lists of plans need no torch


def __dir__() -> list[str]:
    return __all__
