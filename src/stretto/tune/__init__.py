"""The loops that measure, plan and apply inside a run."""

from stretto.tune.auto import AutoPlan
from stretto.tune.memory import PlanMemory
from stretto.tune.options import ENSEMBLE, GUIDED, TuneOptions
from stretto.tune.profiling import DeferredProfile, deferred_plan
from stretto.tune.settled import OnSettled, Settled, summary

__all__ = [
    "ENSEMBLE",
    "GUIDED",
    "AutoPlan",
    "DeferredProfile",
    "OnSettled",
    "PlanMemory",
    "Settled",
    "TuneOptions",
    "deferred_plan",
    "summary",
]
