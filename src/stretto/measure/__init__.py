"""Measuring a job and a network."""

from stretto.measure.backward import ObservedStep, StepObserver, profile_model
from stretto.measure.network import NetworkSamples, probe_network

__all__ = [
    "NetworkSamples",
    "ObservedStep",
    "StepObserver",
    "probe_network",
    "profile_model",
]
