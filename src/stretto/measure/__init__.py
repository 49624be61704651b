"""Measure a job and a network.

- `backward`: a model's workload from real steps (for `script` and `tune`, and
  programs); `hook_warnings`: no warning of its hooks (for `backward`); `clocks`: the
  host's clock or a device's (shared); `steady`: whether measurements agree (shared).
- `script`: the workload of an unmodified script (for `cli.profile`).
- `network`: times of all-reduces (shared).
- `contention`: the loop that reads contention, by `beside` (real collectives) or
  `synthetic` (a device without peers); `load`: the computation.
- `emulated`: a model that waits (for `_api.replaying`); `others`: other programs' use
  of the processors (for `demo`).
"""

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
