"""Collectives in an order that ranks agree on at run time.

- `engine`: what callers use (for `horovod.world`, `jax.ranks` and `reducer`, and
  programs).
- `api`: its options, handles and observers (shared, for instance by `control_thread`
  and `engine`).
- `requests`: what one rank asks for (shared, for instance by `ledger` and `pending`).
- `pending`: what it still waits for (shared, for instance by `control_thread` and
  `collectives`).
- `control_thread`: the thread in which ranks agree (for `engine`).
- `rounds`: agree which requests are ready (for `control_thread` and `send`).
- `ledger`: what follows from a round (for `control_thread` and `rounds`).
- `progress`: pace rounds and find stalls (for `control_thread`).
- `buckets`: form buckets of requests (for `send` and `stable_order`).
- `send`: pack requests and send them over lanes (for `control_thread`).
- `reductions`: scaling, and types that are sent as others (shared, for instance by
  `rounds` and `send`).
- `collectives`: all collectives except all-reduce (for `send`).
- `completion`: complete the handles (for `send`).
- `tensor_set`: gradients that are submitted together (for `control_thread` and
  `engine`, and programs).
- `stable_order`: the order that they keep (for `tensor_set`).
- `reducer`: DDP's Reducer on the engine (for `_api.ddp` and `ddp`).
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
