"""Collectives in an order that ranks agree on at run time."""

from stretto.runtime.negotiated.engine import Engine, members_of
from stretto.runtime.negotiated.handles import Handle
from stretto.runtime.negotiated.jobs import request_of
from stretto.runtime.negotiated.options import EngineOptions
from stretto.runtime.negotiated.requests import Kind, Op, Request
from stretto.runtime.negotiated.spans import AbstractEngineObserver
from stretto.runtime.negotiated.tensor_set import StepEnd, TensorSet

__all__ = [
    "AbstractEngineObserver",
    "Engine",
    "EngineOptions",
    "Handle",
    "Kind",
    "Op",
    "Request",
    "StepEnd",
    "TensorSet",
    "members_of",
    "request_of",
]
