"""Plain data types and their files.

- `workload`, `cluster`, `plan`, `timeline`, `samples`, `tuning`: one kind of file each,
  for data-parallel training.
- `burst`, `burst_host`, `efficiency`: those of burst training; `collocation`: of a pair
  of jobs; `job`: of a cluster's jobs.
- `codec`: reads and writes all files, with `_json` (strict JSON), `_convert` (values)
  and `rules` (checks).
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
