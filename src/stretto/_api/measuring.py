"""Probe networks and devices and fit the samples, for `stretto.probe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stretto.cost.fit import fit_cluster
from stretto.cost.resource_contention import fit_compute as fit_compute
from stretto.cost.resource_contention import with_contention
from stretto.errors import SpecError
from stretto.measure import (
    CollectiveBench,
    count_hosts,
    probe_network,
    read_contention,
)
from stretto.measure.load import backward, convolutions
from stretto.measure.network import device_of
from stretto.runtime import backends
from stretto.runtime.agreement import Agreement
from stretto.runtime.lanes import LanePool, ResourceLaunch
from stretto.runtime.store import ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from stretto.schema import Cluster
    from stretto.schema.samples import ContentionReadings


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
        SpecError: there are too few ranks, or the budget is too small.
        Infeasible: no network can have these times.
        NoisyProfile: no model fits the times.
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


def probe_contention(
    cluster: Cluster,
    *,
    resources: Sequence[int],
    group: ProcessGroup | None = None,
    load: Callable[[], None] | None = None,
    **options: Any,
) -> Cluster:
    """Return a cluster with contention measured by resource on real lanes. Collective.

    ``options`` are `read_contention`'s.

    Raises:
        SpecError, Infeasible, NoisyProfile: As `read_contention`, `with_contention`.
    """
    device = device_of(group)
    chosen = load or (backward(device) if device.type == "cuda" else None)
    world = group or dist.group.WORLD
    assert world is not None  # noqa: S101 - there is a default group
    ranks = ranks_of(world, timeout_s=None)
    pool = LanePool(
        ranks,
        serial=Agreement(ranks).serial,
        backend=backends.for_device(device.type).name,
        device=device,
    )
    try:
        bench = CollectiveBench(
            launch_of=lambda resource: ResourceLaunch(
                pool, resource, cut=device.type == "cpu"
            ),
            load=chosen or convolutions(device),
            group=group,
        )
        readings = read_contention(bench, resources=resources, **options)
    finally:
        pool.close()
    return with_contention(cluster, readings)


def probe_device(
    *,
    resources: Sequence[int],
    device: torch.device | None = None,
    load: Callable[[], None] | None = None,
    block_bytes_per_s: float | None = None,
    **options: Any,
) -> ContentionReadings:
    """Measure how a CUDA device slows beside a kernel that emulates a collective.

    ``options`` are `read_contention`'s.

    Raises:
        SpecError: there is no device, or a level exceeds half of its multiprocessors.
    """
    # Imported here, because the module compiles for a device.
    from stretto.measure.synthetic import DEFAULT_BLOCK_BYTES_PER_S, SyntheticBench

    if not torch.cuda.is_available():
        raise SpecError(
            "measuring contention without peers needs a CUDA device, and this machine "
            "has none: measure with ranks (`stretto probe --resources`)"
        )
    device = device or torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    limit = backends.for_device(device.type).max_resource(device)
    if limit is not None and max(resources) > limit:
        raise SpecError(
            f"resources must be <= {limit}, half of this device's {count} "
            f"multiprocessors, got {max(resources)}"
        )
    bench = SyntheticBench(
        load=load or backward(device),
        device=device,
        max_blocks=max(resources),
        block_bytes_per_s=block_bytes_per_s or DEFAULT_BLOCK_BYTES_PER_S,
    )
    return read_contention(bench, resources=resources, **options)
