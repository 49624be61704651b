"""Policies of a cluster: which job gets which devices."""

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
