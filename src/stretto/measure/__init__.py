"""Measuring a job and a network."""

from stretto.measure.backward import ObservedStep, StepObserver, profile_model
from stretto.measure.hosts import count_hosts
from stretto.measure.network import NetworkSamples, probe_network
from stretto.measure.script import profile_script

__all__ = [
    "NetworkSamples",
    "ObservedStep",
    "StepObserver",
    "count_hosts",
    "probe_network",
    "profile_model",
    "profile_script",
]
