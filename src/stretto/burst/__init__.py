"""Burst parallelism for real models: their layers, measured times, and training.

`tracing` turns a module into layers; `profiling` measures them; `BurstParallel` trains
them, and `checks` compare the ranks. Unless a line says otherwise, `executor` owns what
a file defines, as one of its `parts`.

The model:

- `executor`: `BurstParallel`: what a program calls, and the course of a forward.
- `parts`: construct what a model consists of, and connect it.
- `plan_follower`: set a model up, and keep it on its plan, modes and parameters.
- `plan_change`: bring parameters to other ranks: refreshes and changes of plan.
- `requested_plans`: plans that a cluster requests while the model trains.
- `requirements`: what a module, a plan and a call must be.
- `ownership`: which ranks run which layer.
- `schedule`: what a rank does in a forward, computed once per plan (for `captures`
  and `forward_exchange`).
- `graph`: capture a module (for `captures`, and the public function).
- `captures`: a model's captures for its modes and values.

A step:

- `forward_exchange`: the numbers that ranks exchange and compare at a forward's start.
- `forward`: run each layer on this rank, with moves in between.
- `activation_transfer`: the moves and their way back (for `forward` too).
- `boundary`: weigh gradients where they enter and leave the model.
- `backward_pass`: a backward, from its first gradient to its last.
- `gradient_sync`: add a layer's gradients over its ranks (for `plan_follower`
  and `backward_pass`).
- `shadows`: keep gradients that bypass the layers apart.
- `reach`: the parameters that a backward reaches (for `backward_pass`).
- `gathered_outputs`: find losses on outputs gathered from uneven ranks (for
  `torch_seam`).
- `held_activations`: find losses on activations that hooks kept.
- `hooks`: call the program's hooks as one process would.
- `norm`, `dropout`: statistics and masks of the whole batch, in layers (for `forward`).
- `timings`: what a rank's step consists of.

Ranks:

- `rank_groups`: connections, among all ranks and among a layer's.
- `rank_meeting`: agree before anything is built or sent.
- `refusals`: inform ranks that wait for one that raised (for `rank_groups`).
- `parameters`: send parameters, gradients and optimizer states between ranks (for
  `plan_follower` and `plan_change`).
- `memory`: values as bytes (for `parameters`, `activation_transfer`, `tracing` and
  `checks`).

PyTorch's functions:

- `torch_calls`: joined over the ranks for burst models, installed once per process.
- `torch_seam`: a model as `torch_calls` sees it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.burst.executor import BurstParallel
    from stretto.burst.graph import capture
    from stretto.burst.profiling.layer_profile import profile
    from stretto.burst.tracing.inner_calls import row_wise
    from stretto.burst.tracing.layers import LayerGraph, LayerNode

__all__ = ["BurstParallel", "LayerGraph", "LayerNode", "capture", "profile", "row_wise"]

_HOMES = {
    "BurstParallel": "executor",
    "LayerGraph": "tracing.layers",
    "LayerNode": "tracing.layers",
    "capture": "graph",
    "profile": "profiling.layer_profile",
    "row_wise": "tracing.inner_calls",
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
