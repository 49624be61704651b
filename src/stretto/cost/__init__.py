"""Pure formulas that compute seconds and bytes from schema values.

- `collectives`: start-up and volume of all-reduces (shared, for instance by `burst` and
  `concurrency`).
- `concurrency`: flows that share a link (shared, for instance by `sim.certificate` and
  `sim.flows`).
- `contention`: computation beside communication (shared, for instance by
  `sim.certificate` and `papers.libra`).
- `burst`: costs of burst parallelism (shared, for instance by `_api.burst` and
  `planners.burst.problem`).
- `burst_times`: a layer profile with times measured in training (for `_api.burst` and
  `cluster.job_replan`).
- `cluster_size`: a cluster with another number of ranks (shared, for instance by
  `_api.burst` and `cluster.job_plans`).
- `fit`: a cluster from measured all-reduces (shared, for instance by `_api.measuring`
  and `papers.asc`).
- `piecewise`: fits of times that one line does not explain (for `fit`).
- `resource_contention`: contention from its readings (for `_api.measuring`).
- `regression`: the result of all fits (for `fit`, `piecewise` and
  `resource_contention`).
"""

from stretto.cost.cluster_size import cluster_at
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
    "cluster_at",
    "collective_cost",
    "compute_rate",
    "curve_bytes_per_s",
    "flow_rates",
    "gamma_at",
    "ring_all_reduce_s",
    "startup_steps",
    "wire_factor",
]
