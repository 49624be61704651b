"""Measure a job and a network.

- `backward`: a model's workload from real steps (for `script` and `tune`, and
  programs).
- `eager_hooks`: its hooks, which compilers do not see (for `backward`).
- `hook_warnings`: no warning of these hooks (for `eager_hooks`).
- `clocks`: the host's clock or a device's (shared, for instance by
  `burst.profiling.layer_profile` and `burst.profiling.host_costs`).
- `steady`: whether measurements agree (shared, for instance by `backward` and
  `demo.driver`).
- `script`: the workload of an unmodified script (for `cli.profile`).
- `network`: times of all-reduces (shared, for instance by `tune.initial_profile` and
  `_api.measuring`).
- `contention`: the loop that reads contention (shared, for instance by `_api.measuring`
  and `cli.probe`).
- `beside`: contention by real collectives (for `_api.measuring`, and programs).
- `synthetic`: contention on a device without peers (for `_api.measuring`).
- `load`: computation to measure beside communication (for `_api.measuring` and
  `network`).
- `emulated`: a model that waits (for `_api.replaying`).
- `others`: other programs' use of the processors (for `demo`).
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
