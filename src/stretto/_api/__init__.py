"""Functions and classes that a program calls: a few lines of wiring each."""

from stretto._api.planning import compare, contributions, plan, simulate
from stretto.planners.base import with_prediction
from stretto.sim.scaling import cluster_at

__all__ = [
    "cluster_at",
    "compare",
    "contributions",
    "plan",
    "simulate",
    "with_prediction",
]
