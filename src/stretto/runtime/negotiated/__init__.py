"""Collectives in an order that ranks agree on at run time."""

from stretto.runtime.negotiated.api import AbstractEngineObserver, EngineOptions, Handle
from stretto.runtime.negotiated.engine import Engine, members_of
from stretto.runtime.negotiated.pending import request_of
from stretto.runtime.negotiated.requests import Kind, Op, Request
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
