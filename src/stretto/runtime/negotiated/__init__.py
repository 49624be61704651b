"""Collectives in an order that ranks agree on at run time.

- `engine`: what callers use; `api` has its options, handles and observers.
- `requests`, `pending`: what one rank asks for, and what it still waits for.
- `control_thread`: runs `rounds`, in which ranks agree which requests are ready;
  `ledger` holds what follows from a round, `progress` paces rounds and finds stalls.
- `buckets`, `send`, `reductions`, `collectives`, `completion`: pack requests, send them
  over lanes, and complete their handles.
- `tensor_set`, `stable_order`: gradients that are submitted together, and the order
  that they keep; `reducer` is DDP's Reducer on the engine.
"""

from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions, Handle
from stretto.runtime.negotiated.engine import Engine, members_of
from stretto.runtime.negotiated.pending import request_of
from stretto.runtime.negotiated.requests import CollectiveKind, Op, Request
from stretto.runtime.negotiated.tensor_set import StepEnd, TensorSet

__all__ = [
    "AbstractEngineObserver",
    "CollectiveKind",
    "Engine",
    "EngineOptions",
    "Handle",
    "Op",
    "Request",
    "StepEnd",
    "TensorSet",
    "members_of",
    "request_of",
]
