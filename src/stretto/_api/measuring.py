"""Wiring of the measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stretto.cost.fit import fit_cluster
from stretto.measure import count_hosts, probe_network

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from stretto.schema import Cluster


def probe(
    *,
    name: str = "cluster",
    hosts: int | None = None,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Cluster:
    """Measure and fit the cluster under a live process group.

    Call it on every rank; all get the same value. ``options`` are `probe_network`'s.

    Args:
        name: The cluster's name.
        hosts: Number of hosts; by default counted by their host names.
        group: The ranks to measure; all by default.
        **options: ``sizes_bytes``, ``lanes``, ``repetitions``, ``budget_s`` and others.

    Raises:
        SpecError: There are too few ranks, or the budget is too small.
        Infeasible: No network can have these times.
        NoisyProfile: No model fits the times.
    """
    measured = probe_network(group=group, **options)
    ranks = dist.get_world_size(group)
    count = hosts or count_hosts(group)
    return fit_cluster(
        measured.collectives,
        name=name,
        hosts=count,
        ranks_per_host=ranks // count,
        contention_samples=measured.contention,
        provenance=measured.provenance,
        by_size=True,
    )
