"""Pure formulas that compute seconds and bytes from schema values."""

from stretto.cost.collectives import (
    CollectiveCost,
    collective_cost,
    ring_all_reduce_s,
    startup_steps,
    wire_factor,
)
from stretto.cost.concurrency import (
    FlowRates,
    all_reduce_s,
    flow_rates,
    gamma_at,
)
from stretto.cost.contention import SIGMA_MIN, compute_rate, curve_bytes_per_s

__all__ = [
    "SIGMA_MIN",
    "CollectiveCost",
    "FlowRates",
    "all_reduce_s",
    "collective_cost",
    "compute_rate",
    "curve_bytes_per_s",
    "flow_rates",
    "gamma_at",
    "ring_all_reduce_s",
    "startup_steps",
    "wire_factor",
]
