"""Planners: one contract, one file per method, and their registry."""

from stretto.planners.base import AbstractPlanner, Draft, dtype_starts, finish
from stretto.planners.registry import NAMES, get, options_of
from stretto.planners.wire import plan_with_wire

__all__ = [
    "NAMES",
    "AbstractPlanner",
    "Draft",
    "dtype_starts",
    "finish",
    "get",
    "options_of",
    "plan_with_wire",
]
