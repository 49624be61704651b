"""Burst parallelism for real models: their layers, measured times, and training.

`tracing` turns a module into layers; `profiling` measures them; `BurstParallel` trains
them, and `checks` compare the ranks. Unless a line says otherwise, a file is imported
by `executor` or by `parts`, which constructs the model's parts.

The model:

- `executor`: `BurstParallel`: what a program calls, and the course of a forward.
- `parts`: construct what a model consists of, and connect it.
- `plan_follower`: set a model up, and keep it on its plan, modes and parameters.
- `plan_change`: bring parameters to other ranks: refreshes and changes of plan.
- `requested_plans`: plans that a cluster requests while the model trains.
- `requirements`: what a module, a plan and a call must be (shared, for instance by
  `executor` and `plan_change`).
- `ownership`: which ranks run which layer (for `plan_follower` too).
- `schedule`: what a rank does in a forward, computed once per plan (shared, for
  instance by `forward_exchange` and `captures`).
- `graph`: capture a module (for `captures` and `profiling`, and programs).
- `captures`: a model's captures for its modes and values (for `backward_pass` too).

A step:

- `forward_exchange`: the numbers that ranks exchange and compare at a forward's start
  (for `profiling` too).
- `forward`: run each layer on this rank, with moves in between.
- `activation_transfer`: the moves and their way back (for `forward` and `profiling`
  too).
- `boundary`: weigh gradients where they enter and leave the model (shared, for instance
  by `checks.input_classes` and `executor`).
- `backward_pass`: a backward, from its first gradient to its last.
- `gradient_sync`: add a layer's gradients over its ranks (for `plan_follower`
  and `backward_pass`).
- `shadows`: keep gradients that bypass the layers apart (for `backward_pass` too).
- `reach`: the parameters that a backward reaches (for `backward_pass`).
- `gathered_outputs`: find losses on outputs gathered from uneven ranks (for
  `torch_seam`).
- `held_activations`: find losses on activations that hooks kept (for
  `gathered_outputs` and `torch_seam` too).
- `hooks`: call the program's hooks as one process would (shared, for instance by
  `checks.hook_use` and `tracing.reads`).
- `norm`: statistics of the whole batch, in layers (for `forward` and `requirements`).
- `dropout`: masks of the whole batch, in layers (for `forward` and `schedule`).
- `timings`: what a rank's step consists of (for `forward` and `profiling` too).

Ranks:

- `rank_groups`: connections, among all ranks and among a layer's (shared, for instance
  by `schedule` and `checks.replicas`).
- `rank_meeting`: agree before anything is built or sent.
- `refusals`: inform ranks that wait for one that raised (for `rank_groups`,
  `backward_pass` and `checks`).
- `parameters`: send parameters, gradients and optimizer states between ranks (for
  `plan_follower` and `plan_change`).
- `memory`: tensors in values, and values as bytes (shared, for instance by
  `tracing.freezing` and `tracing.rerun`).

PyTorch's functions:

- `torch_calls`: joined over the ranks for burst models, installed once per process
  (for `backward_pass` and `plan_follower` too).
- `torch_seam`: a model as `torch_calls` sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto.burst.executor import BurstParallel
    from stretto.burst.graph import capture
    from stretto.burst.profiling.layer_profile import profile
    from stretto.burst.tracing.inner_calls import row_wise
    from stretto.burst.tracing.layers import LayerGraph, LayerNode

__all__ = ["BurstParallel", "LayerGraph", "LayerNode", "capture", "profile", "row_wise"]

_HOMES = {
    "BurstParallel": "stretto.burst.executor",
    "LayerGraph": "stretto.burst.tracing.layers",
    "LayerNode": "stretto.burst.tracing.layers",
    "capture": "stretto.burst.graph",
    "profile": "stretto.burst.profiling.layer_profile",
    "row_wise": "stretto.burst.tracing.inner_calls",
}


__getattr__ = lazy_names("stretto.burst", _HOMES)  # planning needs no torch


def __dir__() -> list[str]:
    return __all__
