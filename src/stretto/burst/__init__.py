"""Burst parallelism for real models: their layers, measured times, and training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.burst.executor import BurstParallel
    from stretto.burst.graph import capture
    from stretto.burst.layer_profile import profile
    from stretto.burst.tracing.layers import LayerGraph, LayerNode

__all__ = ["BurstParallel", "LayerGraph", "LayerNode", "capture", "profile"]

_HOMES = {
    "BurstParallel": "executor",
    "LayerGraph": "tracing.layers",
    "LayerNode": "tracing.layers",
    "capture": "graph",
    "profile": "layer_profile",
}


def __getattr__(name: str) -> Any:
    """Import a name's module on first use, so that planning starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.burst' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stretto.burst.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
