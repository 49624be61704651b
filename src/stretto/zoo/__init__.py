"""The papers' models and testbeds, generated from their definitions.

`graph` has layers and shapes; `convolutional`, `inception` and `transformer` define
architectures, which `models` lists. `timing` and `profiles` add times and make
workloads and layer profiles. `clusters` has the testbeds.
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
