"""Policies of a cluster: which job gets which devices.

- `base`: the contract (shared, for instance by `deeppool` and `exclusive`).
- `registry`: policies by name, with those of installed packages (shared, for instance
  by `cli._cluster_engine` and `cli._cluster_simulate`).
- `exclusive`: the base of policies with one job per device (shared, for instance by
  `deeppool` and `partition`).
- `fifo`: first come, first served (for `registry`).
- `sized`: ``strong``, ``weak`` and ``batch-optimal``, by how fast jobs become (for
  `deeppool` and `registry`).
- `partition`: a part of the devices for each role (for `registry`).
- `deeppool`: burst plans, with backgrounds beside them (for `registry`).
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
