"""Measure, plan and apply plans while a training run is under way.

The phases:

- `controller`: `AutoPlan`, which runs the phases (for `_api.ddp`, and programs).
- `tuning_meeting`: let ranks meet (for `controller`, `initial_profile` and
  `online_search`).
- `initial_profile`: measure, probe and plan (shared, for instance by `controller` and
  `forced`).
- `evaluations`: leave out steps with validation (for `controller`).
- `online_search`: try plans on real steps (for `controller`).
- `drift_detector`: watch for lasting changes (for `controller`).
- `forced`: a fixed schedule for tests (for `_api.ddp` and `controller`).
- `forward_plans`: whether plans may overlap with forward (for `calibration`, `forced`
  and `initial_profile`).

The search:

- `search`: which plan the next steps execute (for `forward_plans`, `online_search` and
  `tuning_state`).
- `trial`: blocks of steps, and limits (for `options` and `search`).
- `starts`: plans to try first (for `controller`).
- `search_space`: the choices (shared, for instance by `search` and `techniques.base`).
- `paired`: compare two plans (for `search`).
- `calibration`: correct the model by trials (for `controller` and `online_search`).
- `techniques`: propose plans.

Earlier runs:

- `plan_cache`: store plans (shared, for instance by `cli.tune` and `controller`).
- `job_similarity`: find plans of similar jobs (for `plan_cache`).
- `cached_plans`: use stored plans (for `controller` and `tuning_state`).
- `tuning_state`: save a run that ends early (for `controller`).

What a user passes and gets:

- `options`: the options (for `_api.ddp` and `controller`, and programs).
- `result`: the result (shared, for instance by `controller` and `artifacts`).
- `artifacts`: files that a run writes about itself (for `_api.ddp`).
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
