"""Pure formulas that compute seconds and bytes from schema values.

- `collectives`: start-up and volume of all-reduces; `concurrency`: flows that share a
  link; `contention`: computation beside communication. Planners and `stretto.sim` use
  these three.
- `burst`: costs of burst parallelism (shared); `burst_times`: a layer profile with
  times measured in training (for `_api.burst` and `cluster.job_replan`).
- `cluster_size`: a cluster with another number of ranks (shared).
- `fit`: a cluster from measured all-reduces, with `piecewise`; `resource_contention`:
  contention from its readings. Both return a `regression`. Probes and the tuner call
  them.
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
