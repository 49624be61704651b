"""Simulate one step under a plan, and bound what any plan can reach."""

from stretto.sim.bounds import LowerBound, lower_bound
from stretto.sim.forward import forward_bound_s
from stretto.sim.step import StepModel, StepResult, simulate_step

__all__ = [
    "LowerBound",
    "StepModel",
    "StepResult",
    "forward_bound_s",
    "lower_bound",
    "simulate_step",
]
