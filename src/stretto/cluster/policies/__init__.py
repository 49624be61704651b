"""Policies of a cluster: which job gets which devices.

- `base`: the contract; `registry`: policies by name, with those of installed packages.
- `exclusive`: one job per device, the base of `fifo` and of `sized`, which has
  ``strong``, ``weak`` and ``batch-optimal``.
- `partition`: a part of the devices for each role; `deeppool`: burst plans, with
  backgrounds beside them.
- `offers`: ranks beside which a background may run (for `deeppool` and
  `engine_sim`).
"""

from stretto.cluster.policies.base import (
    AbstractPolicy,
    Attach,
    Decision,
    Detach,
    Resize,
    Start,
    Stop,
)

__all__ = [
    "AbstractPolicy",
    "Attach",
    "Decision",
    "Detach",
    "Resize",
    "Start",
    "Stop",
]
