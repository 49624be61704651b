"""The loops that measure, plan and apply inside a run."""

from stretto.tune.auto import AutoPlan, OnSettled, Settled, summary
from stretto.tune.profiling import DeferredProfile, deferred_plan

__all__ = [
    "AutoPlan",
    "DeferredProfile",
    "OnSettled",
    "Settled",
    "deferred_plan",
    "summary",
]
