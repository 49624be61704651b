"""stretto: overlap communication with computation in synchronous training.

    model = stretto.DistributedDataParallel(model)      # in place of DDP

Names are loaded on first use, so that planning never loads torch.
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
