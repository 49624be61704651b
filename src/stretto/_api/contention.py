"""Measure contention by resource, fit it, and add it to a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.cost.libra import (
    RateSample,
    SlowdownSample,
    fit_contention,
    fit_slowdown,
)
from stretto.errors import SpecError
from stretto.measure import CollectiveBench, read_contention
from stretto.measure.load import backward, convolutions
from stretto.runtime.agreement import Agreement, ranks_of
from stretto.runtime.backends.nccl import most_ctas_of
from stretto.runtime.lanes import LanePool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from stretto.cost.regression import Fitted
    from stretto.measure import ContentionReadings
    from stretto.schema import Cluster, ComputeContention, Contention


def fit_compute(readings: ContentionReadings) -> Fitted[ComputeContention]:
    """Fit LIBRA's alpha to readings (Eq. 5).

    Raises:
        SpecError, Infeasible: As `fit_slowdown`.
    """
    return fit_slowdown(_slowdowns(readings))


def with_contention(cluster: Cluster, readings: ContentionReadings) -> Cluster:
    """Add measured contention by resource to a cluster; return the fit's quality too.

    Raises:
        SpecError: Nothing was sent, so rates are unknown.
        Infeasible: The readings contradict the model or the cluster's link.
    """
    if not readings.rates:
        raise SpecError(
            "these readings come from a device without peers: they show how "
            "computation slows, but no rates. Measure with ranks (`stretto probe "
            "--resources`)"
        )
    overlapped, exclusive = (
        [
            RateSample(
                resource=reading.resource,
                wire_bytes=reading.wire_bytes,
                transmission_s=getattr(reading, name),
            )
            for reading in readings.rates
        ]
        for name in ("overlapped_s", "exclusive_s")
    )
    # A rate above the link's fitted rate means that the fitted lanes did not saturate
    # the link, and that these connections did.
    fastest = max(sample.bytes_per_s for sample in (*overlapped, *exclusive))
    link = max(cluster.bottleneck.bandwidth_bytes_per_s, fastest)
    fit = fit_contention(
        _slowdowns(readings), overlapped, exclusive, link_bytes_per_s=link
    )
    return replace(
        cluster,
        contention=fit.value,
        provenance={
            **cluster.provenance,
            "contention": {
                **readings.provenance,
                "link_bytes_per_s": link,
                "slowdown": _report(fit.slowdown),
                "overlapped": _report(fit.overlapped),
                "exclusive": _report(fit.exclusive),
            },
        },
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
    backend = str(dist.get_backend(group))
    device = torch.device("cpu")
    if "nccl" in backend:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = load or (backward(device) if device.type == "cuda" else None)
    world = group or dist.group.WORLD
    assert world is not None  # noqa: S101 - the backend was asked above
    ranks = ranks_of(world, timeout_s=None)
    pool = LanePool(
        ranks,
        serial=Agreement(ranks).serial,
        backend="nccl" if "nccl" in backend else "gloo",
        device=device,
    )
    try:
        bench = CollectiveBench(
            launch_of=lambda resource: _Launch(
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

    Not yet run on a GPU. ``options`` are `read_contention`'s.

    Raises:
        SpecError: There is no device, or a level exceeds half of its multiprocessors.
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
    most = most_ctas_of(count)
    if max(resources) > most:
        raise SpecError(
            f"resources must be <= {most}, half of this device's {count} "
            f"multiprocessors, got {max(resources)}"
        )
    bench = SyntheticBench(
        load=load or backward(device),
        device=device,
        most=max(resources),
        block_bytes_per_s=block_bytes_per_s or DEFAULT_BLOCK_BYTES_PER_S,
    )
    return read_contention(bench, resources=resources, **options)


@final
@dataclass(frozen=True, slots=True)
class _Launch:
    """Return an all-reduce of a given resource on lane 0 of a pool."""

    pool: LanePool

    resource: int

    cut: bool
    """Return whether the message is cut into as many pieces, as on Gloo."""

    def __call__(self, message: torch.Tensor) -> list[Any]:
        lane = self.pool.lane(0, self.resource)
        pieces = message.chunk(self.resource) if self.cut else (message,)
        return [lane.allreduce([piece]) for piece in pieces]


def _slowdowns(readings: ContentionReadings) -> list[SlowdownSample]:
    return [
        SlowdownSample(
            resource=reading.resource,
            compute_alone_s=reading.compute_alone_s,
            compute_overlapped_s=reading.compute_overlapped_s,
        )
        for reading in readings.slowdowns
    ]


def _report(fitted: Fitted[Contention] | Fitted[Any]) -> dict[str, Any]:
    return {
        "std_errors": {
            name: error if error < float("inf") else None
            for name, error in fitted.std_errors.items()
        },
        "residual_ratios": list(fitted.residual_ratios),
    }
