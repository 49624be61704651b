"""The papers' models and testbeds, generated from their definitions.

- `models`: models by name (shared, for instance by `timing` and `profiles`).
- `graph`: layers and shapes (shared, for instance by `transformer` and
  `convolutional`).
- `convolutional`: convolutional networks, without the Inception family (for `models`).
- `inception`: Inception-v3 and v4 (for `models`).
- `transformer`: Transformers, BERT and GPT-2 (for `models`).
- `timing`: workloads with computed times (shared, for instance by `profiles` and
  `cli.zoo`).
- `profiles`: layer profiles with times (for `cli.zoo`, `cluster.replay` and
  `papers.deeppool`, and programs).
- `clusters`: the testbeds (shared, for instance by `papers.asc` and `papers.aiacc`).
"""

from stretto.zoo.clusters import CLUSTERS, cluster
from stretto.zoo.graph import GraphLayer, ModelGraph, Parameter
from stretto.zoo.models import MODELS, model
from stretto.zoo.profiles import layer_profile
from stretto.zoo.timing import (
    ANCHORS,
    DEVICES,
    Anchor,
    RooflineDevice,
    anchor,
    workload,
)

__all__ = [
    "ANCHORS",
    "CLUSTERS",
    "DEVICES",
    "MODELS",
    "Anchor",
    "GraphLayer",
    "ModelGraph",
    "Parameter",
    "RooflineDevice",
    "anchor",
    "cluster",
    "layer_profile",
    "model",
    "workload",
]
