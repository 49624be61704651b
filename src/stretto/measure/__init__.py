"""Measure a job and a network."""

from stretto.measure.backward import ObservedStep, StepObserver, profile_model
from stretto.measure.beside import CollectiveBench
from stretto.measure.contention import AbstractContentionBench, read_contention
from stretto.measure.network import NetworkSamples, count_hosts, probe_network
from stretto.measure.script import profile_script
from stretto.schema.samples import ContentionReadings

__all__ = [
    "AbstractContentionBench",
    "CollectiveBench",
    "ContentionReadings",
    "NetworkSamples",
    "ObservedStep",
    "StepObserver",
    "count_hosts",
    "probe_network",
    "profile_model",
    "profile_script",
    "read_contention",
]
