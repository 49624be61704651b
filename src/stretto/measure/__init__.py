"""Measuring a job and a network."""

from stretto.measure.network import NetworkSamples, probe_network

__all__ = ["NetworkSamples", "probe_network"]
