"""stretto: overlap communication with computation in synchronous training.

    model = stretto.DistributedDataParallel(model)      # in place of DDP

Names are loaded on first use, so that planning never loads torch. ARCHITECTURE.md says
what the packages are. Files beside them:

- `_version`: the versions of the package and of the torch that it needs (shared, for
  instance by `cli.doctor` and `members.peers`).
- `autograd_engine`: the end of a backward (shared, for instance by
  `background.script_leases` and `runtime.planned_group`).
- `boolean_options`: checks of options that are true or false (shared, for instance by
  `elastic.training` and `optim.adam_sgd`).
- `errors`: all exceptions that stretto raises on purpose (shared, for instance by
  `cli._main` and `schema.rules`).
- `foreground_marks`: steps and waits, reported to a background (shared, for instance by
  `background.foreground` and `horovod.torch.gradients`).
- `lazy_names`: imports on first use (shared, for instance by `stretto` and
  `background.devices`).
- `logs`: the loggers (shared, for instance by `_api.ddp` and `runtime.ddp_reducer`).
- `main_module`: run a script as the main module (shared, for instance by `script` and
  `measure.script`).
- `network_interfaces`: which exist, and which has an address (for `cli._ranks`,
  `cluster.part_start` and `script`).
- `plan_requests`: requests to change a plan (for `burst.requested_plans` and
  `cluster.plan_changes`).
- `plugins`: classes by name and entry point (shared, for instance by `runtime.backends`
  and `cluster.policies.registry`).
- `process_identity`: processes of this host (shared, for instance by `runtime.presence`
  and `runtime.failure`).
- `rank_variables`: a rank's place, as launchers set it (for `horovod.environment` and
  `members.launchers`).
- `script`: run a user's script with stretto's DDP (for `cli._elastic`, `cli.run` and
  `cluster.part_spec`).
- `step_counts`: steps that a supervisor reads (shared, for instance by `members.keeper`
  and `cluster.step_reports`).
- `step_hooks`: hooks of optimizers that read no parameters (shared, for instance by
  `runtime.forward.steps` and `background.script_leases`).
- `units`: text to seconds, bytes and rates (shared, for instance by `cli._values` and
  `report.page`).
- `variable_names`: the names of stretto's environment variables (shared, for instance
  by `cli.run` and `background.board`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto._version import __version__
from stretto.lazy_names import lazy_names

if TYPE_CHECKING:
    from stretto._api.burst import plan_layers
    from stretto._api.ddp import DistributedDataParallel
    from stretto._api.ddp import DistributedDataParallel as DDP  # noqa: N817
    from stretto._api.measuring import probe
    from stretto._api.planning import compare, plan, simulate
    from stretto.background.foreground import Foreground
    from stretto.background.lease import Background
    from stretto.burst.executor import BurstParallel
    from stretto.burst.profiling.collective_profile import profile_layers
    from stretto.elastic.training import Elastic
    from stretto.gang.gang import Gang
    from stretto.measure import profile_model as profile
    from stretto.runtime.forward.steps import separable
    from stretto.schema import Cluster, Plan, Timeline, Workload
    from stretto.schema.burst import BurstPlan, LayerProfile
    from stretto.tune import TuneOptions

__all__ = [
    "DDP",
    "Background",
    "BurstParallel",
    "BurstPlan",
    "Cluster",
    "DistributedDataParallel",
    "Elastic",
    "Foreground",
    "Gang",
    "LayerProfile",
    "Plan",
    "Timeline",
    "TuneOptions",
    "Workload",
    "__version__",
    "compare",
    "plan",
    "plan_layers",
    "probe",
    "profile",
    "profile_layers",
    "separable",
    "simulate",
]

_HOMES = {
    "Background": "stretto.background.lease",
    "Foreground": "stretto.background.foreground",
    "Gang": "stretto.gang.gang",
    "BurstParallel": "stretto.burst.executor",
    "BurstPlan": "stretto.schema.burst",
    "LayerProfile": "stretto.schema.burst",
    "profile_layers": "stretto.burst.profiling.collective_profile",
    "plan_layers": "stretto._api.burst",
    "DDP": "stretto._api.ddp:DistributedDataParallel",
    "DistributedDataParallel": "stretto._api.ddp",
    "Elastic": "stretto.elastic.training",
    "probe": "stretto._api.measuring",
    "profile": "stretto.measure:profile_model",
    "plan": "stretto._api.planning",
    "compare": "stretto._api.planning",
    "separable": "stretto.runtime.forward.steps",
    "simulate": "stretto._api.planning",
    "Cluster": "stretto.schema",
    "Plan": "stretto.schema",
    "Timeline": "stretto.schema",
    "TuneOptions": "stretto.tune",
    "Workload": "stretto.schema",
}

__getattr__ = lazy_names("stretto", _HOMES)


def __dir__() -> list[str]:
    return __all__
