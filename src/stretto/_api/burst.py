"""Profile models and plan bursts, for `stretto burst` and `stretto.plan_layers`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.cost import cluster_at
from stretto.cost.burst import DEEPPOOL, BurstNetwork
from stretto.cost.burst_times import updated as updated
from stretto.errors import SpecError
from stretto.planners.burst import collocated as collocated
from stretto.planners.burst import plan as planning
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.scaling import scaling
from stretto.planners.burst.simulated import NEAR_RATIO as NEAR_RATIO
from stretto.planners.burst.simulated import plan_on as plan_on
from stretto.planners.burst.simulated import simulate as simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from stretto.planners.burst.scaling import ScaledGpus
    from stretto.schema import Cluster
    from stretto.schema.burst import BurstPlan, LayerProfile, LayerTiming
    from stretto.schema.efficiency import SampleEfficiency

MAX_SIMULATED = 64
"""Largest number of GPUs for which plans are compared by simulated steps."""


def problem(
    profile: LayerProfile,
    *,
    gpus: int,
    batch: int,
    amplification_limit: float | None = None,
    widths: str | Sequence[int] = "powers",
    cluster: Cluster | None = None,
) -> BurstProblem:
    """Return a burst planning problem.

    Args:
        profile: Layers and their times.
        gpus: Number of GPUs that a plan may use.
        batch: Samples of a step over all GPUs.
        amplification_limit: Limit of each layer's GPU time relative to that on one GPU.
        widths: The numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``,
            or numbers up to ``gpus``.
        cluster: The network; by default DeepPool's published constants.

    Raises:
        SpecError: a limit is below 1, or a width breaks its rule.
    """
    limit = amplification_limit
    if limit is not None and not 1 <= limit < math.inf:
        raise SpecError(
            f"the amplification limit must be finite and >= 1, got {limit:g}: 1 asks "
            "for no more GPU time than on one GPU",
            place=".amplification_limit",
        )
    network = DEEPPOOL if cluster is None else BurstNetwork.of(cluster, gpus)
    return BurstProblem.of(
        profile,
        network,
        gpus=gpus,
        batch=batch,
        widths=widths,
        amplification_limit=limit,
    )


def plan(problem: BurstProblem) -> BurstPlan:
    """Return the fastest plan within the limit.

    Raises:
        Infeasible: no plan keeps the limit; the error names the nearest feasible limit.
        SpecError: a needed time is not profiled.
    """
    return planning.plan(problem)


def front(problem: BurstProblem) -> list[BurstPlan]:
    """Return the Pareto front of step time against GPU time, fastest plan first.

    Raises:
        Infeasible: no plan keeps the limit; the error names the nearest feasible limit.
        SpecError: a needed time is not profiled.
    """
    return planning.plans_of_front(problem)


def plan_layers(
    profile: LayerProfile,
    *,
    gpus: int,
    batch: int,
    cluster: Cluster | None = None,
    measured: Iterable[LayerTiming] = (),
    amplification_limit: float | None = None,
    widths: str | Sequence[int] = "powers",
    cores: float | None = None,
) -> BurstPlan:
    """Return the burst plan with the shortest step.

    Args:
        profile: The model's layers, from `profile_layers` or `stretto burst profile`.
        gpus: Ranks to use.
        batch: Samples of a step over all ranks.
        cluster: The network, from `stretto.probe` or a file; DeepPool's published
            constants if ``None``.
        measured: Layer times that ranks measured in training (`BurstParallel.measured`,
            of all ranks together), used instead of the profile's times.
        amplification_limit: Largest GPU time of a layer relative to that on one GPU.
        widths: The numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``,
            or numbers.
        cores: Processors that all ranks of an emulated cluster share.

    Raises:
        Infeasible: no plan keeps the limit.
        SpecError: an argument is invalid, or a needed time is not profiled.
        PlanMismatch: a measured layer is missing from the profile.
    """
    timings = list(measured)
    task = problem(
        updated(profile, timings) if timings else profile,
        gpus=gpus,
        batch=batch,
        amplification_limit=amplification_limit,
        widths=widths,
        cluster=cluster,
    )
    if cluster is None or gpus > MAX_SIMULATED:
        return plan(task)
    return plan_on(task, cluster, cores=cores)[0]


def scale(
    profile: LayerProfile,
    efficiency: SampleEfficiency,
    *,
    batch: int,
    gpus: Sequence[int],
    cluster: Cluster | None = None,
    bandwidth_bytes_per_s: float | None = None,
) -> tuple[ScaledGpus, ...]:
    """Compare weak, strong, batch-optimal and burst scaling; see `scaling`.

    The network is the cluster's, resized to each number of GPUs. Without a cluster it
    is DeepPool's published constants, with another bandwidth if one is given.

    Raises:
        SpecError: one GPU cannot run ``batch``, the curve does not contain it, or the
            GPUs do not fill the cluster's hosts.
    """

    def network_at(count: int) -> BurstNetwork:
        if cluster is not None:
            return BurstNetwork.of(cluster_at(cluster, count), count)
        if bandwidth_bytes_per_s is None:
            return DEEPPOOL
        link = replace(DEEPPOOL.transfer, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        return replace(DEEPPOOL, transfer=link, near=link, far=link)

    return scaling(profile, efficiency, network_at, batch=batch, gpus=gpus)


def profile(
    module: nn.Module, example_inputs: tuple[Any, ...], **options: Any
) -> LayerProfile:
    """Return the layer profile of a module, see `stretto.burst.profile`."""
    # Imported here: planning burst jobs does not load torch.
    from stretto.burst.profiling.layer_profile import profile as measured

    return measured(module, example_inputs, **options)
