"""Plain data types and their files."""

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
