"""Plain data types and their files.

One kind of file each, for data-parallel training:

- `workload`: a model's tensors and times (shared, for instance by `planners.base` and
  `tune.calibration`).
- `cluster`: figures of the hardware (shared, for instance by `zoo.clusters` and
  `cost.fit`).
- `plan`: what planning passes to the runtime (shared, for instance by `planners.base`
  and `tune.controller`).
- `timeline`: spans, predicted and measured (shared, for instance by
  `runtime.recording.step` and `runtime.recording.merging`).
- `samples`: times that probes measure (for `measure.contention`, `measure.network` and
  `tune.initial_profile`, and programs).
- `tuning`: the record of a tuning run (shared, for instance by `report.tuning` and
  `tune.controller`).

For burst training and clusters:

- `burst`: layer profiles and burst plans (shared, for instance by
  `burst.profiling.layer_profile` and `planners.burst.cuts`).
- `burst_host`: costs that hosts add to layers (for `burst.profiling.host_costs` and
  `burst`).
- `efficiency`: samples that training needs, by batch (for `cli._burst_scale`,
  `cluster.replay` and `cluster.speeds`).
- `collocation`: costs and rates of a pair of jobs (shared, for instance by
  `background.script_leases` and `cli._burst_background`).
- `job`: a cluster's job as users describe it (shared, for instance by `cluster.replay`
  and `cluster.policies.deeppool`).

Files:

- `codec`: reads and writes all of these (shared, for instance by `tune.initial_profile`
  and `tune.cached_plans`).
- `_json`: strict JSON (for `codec` and `timeline`).
- `_convert`: JSON as values (shared, for instance by `job` and `burst_host`).
- `rules`: checks of values (shared, for instance by `burst` and `job`).
"""

from stretto.schema.cluster import (
    AllReduceFit,
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    ExtraStartup,
    Link,
    RateCurve,
)
from stretto.schema.collocation import CollocatedPair, Collocation
from stretto.schema.plan import NARROWER, Bucket, Plan, Prediction, slice_bounds
from stretto.schema.samples import CollectiveSample, ContentionSample
from stretto.schema.timeline import Span, Timeline
from stretto.schema.workload import TensorSpec, Workload, model_digest, tensors_digest

__all__ = [
    "NARROWER",
    "AllReduceFit",
    "Bucket",
    "Cluster",
    "CollectiveSample",
    "CollocatedPair",
    "Collocation",
    "ComputeContention",
    "Concurrency",
    "Contention",
    "ContentionSample",
    "ExtraStartup",
    "Link",
    "Plan",
    "Prediction",
    "RateCurve",
    "Span",
    "TensorSpec",
    "Timeline",
    "Workload",
    "model_digest",
    "slice_bounds",
    "tensors_digest",
]
