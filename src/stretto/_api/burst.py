"""Wiring of burst planning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.cost.burst import DEEPPOOL, BurstNetwork
from stretto.cost.burst_times import updated as updated
from stretto.errors import SpecError, StrettoError
from stretto.planners.burst import plan as planning
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.scaling import scaling
from stretto.sim.burst import BUCKET_BYTES, BurstStep, simulate_burst
from stretto.sim.scaling import cluster_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist
    from torch import nn

    from stretto.planners.burst.scaling import ScaledGpus
    from stretto.schema import Cluster
    from stretto.schema.burst import BurstPlan, LayerProfile, LayerTiming
    from stretto.schema.efficiency import SampleEfficiency

_EXPOSED = (1.0, 0.5, 0.25, 0.1, 0.0)
"""Parts of synchronization that candidate plans are searched for."""

NEAR_RATIO = 0.02
"""Profiles cannot rank plans whose simulated steps are this close to the shortest. The
plan that computes least is chosen among them.
"""

MOST_SIMULATED = 64
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
        batch: Samples of an iteration over all GPUs.
        amplification_limit: Limit of each layer's GPU time relative to that on one GPU.
        widths: The numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``,
            or numbers that divide ``gpus``.
        cluster: The network; by default DeepPool's published constants.

    Raises:
        SpecError: A limit is below 1, or a width breaks its rule.
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
        Infeasible: No plan keeps the limit; the error names the nearest feasible limit.
        SpecError: A needed time is not profiled.
    """
    return planning.plan(problem)


def front(problem: BurstProblem) -> list[BurstPlan]:
    """Return the Pareto front of iteration time against GPU time, fastest plan first.

    Raises:
        Infeasible: No plan keeps the limit; the error names the nearest feasible limit.
        SpecError: A needed time is not profiled.
    """
    return planning.plans_of_front(problem)


def simulate(
    profile: LayerProfile,
    plan: BurstPlan,
    cluster: Cluster,
    *,
    shares: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    lanes: int = 1,
    cores: float | None = None,
) -> BurstStep:
    """Simulate a plan's step on a cluster, event by event; see `simulate_burst`.

    ``shares`` are the samples that each rank starts with; by default they are equal.
    """
    from stretto.burst.layout import Layouts

    given = even_shares(plan.batch, plan.gpus) if shares is None else shares
    return simulate_burst(
        profile,
        plan,
        cluster,
        Layouts(given),
        bucket_bytes=bucket_bytes,
        lanes=lanes,
        cores=cores,
    )


def even_shares(batch: int, gpus: int) -> tuple[int, ...]:
    """Return nearly equal numbers of samples by rank, larger on the first ranks."""
    return tuple(-(-(batch - i) // gpus) for i in range(gpus))


def plan_on(
    problem: BurstProblem, cluster: Cluster, **options: Any
) -> tuple[BurstPlan, BurstStep]:
    """Return the plan with about the shortest simulated step, and that step.

    The search counts a layer's synchronization as if it came after its backward. In
    fact some of it overlaps other layers' backward. So the function searches a plan for
    each of several parts of the synchronization, adds the plans of one width, and
    simulates each. It returns the fastest plan, or one that computes less and is
    equally fast within `NEAR_RATIO`. With a limit it considers only plans that keep the
    limit with the full synchronization counted. The prediction is the simulation's.

    Args:
        problem: From `problem`, for this cluster.
        cluster: Where the plan runs.
        options: Options of `simulate`: ``bucket_bytes``, ``lanes``, ``cores``.

    Raises:
        Infeasible: No plan keeps the limit; the error names the nearest feasible limit.
        SpecError: A needed time is not profiled.
    """
    limit = problem.amplification_limit
    found = [planning.plan(problem)]
    for ratio in _EXPOSED[1:] if limit is None else ():
        network = replace(problem.network, exposed_ratio=ratio)
        found.append(planning.plan(replace(problem, network=network)))
    alone = {gpus: planning.same_width(problem, gpus) for gpus in problem.widths}
    steps = {
        width: simulate(problem.profile, each, cluster, **options)
        for width, each in alone.items()
    }
    tried = list(steps.values()) if limit is None else []
    plans = list(alone.values()) if limit is None else []
    for each in found:
        plans.append(each)
        tried.append(simulate(problem.profile, each, cluster, **options))
    near_s = min(each.iteration_s for each in tried) * (1 + NEAR_RATIO)
    best = min(
        (i for i, each in enumerate(tried) if each.iteration_s <= near_s),
        key=lambda i: (sum(tried[i].computing_s), tried[i].iteration_s, i),
    )
    width = min(steps, key=lambda gpus: (steps[gpus].iteration_s, gpus))
    step = tried[best]
    gpu_s, single_s = sum(step.computing_s), sum(problem.single_s)
    predicted = plans[best].predicted
    if predicted is None:
        raise AssertionError("a planner's plan has no prediction")
    return replace(
        plans[best],
        predicted=replace(
            predicted,
            iteration_s=step.iteration_s,
            gpu_s=gpu_s,
            amplification=gpu_s / single_s if single_s > 0 else 0.0,
            data_parallel_s=steps[problem.widths[-1]].iteration_s,
            single_width=width,
            single_width_s=steps[width].iteration_s,
            idle_gpu_s=sum(step.idle_s),
        ),
    ), step


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
        Infeasible: No plan keeps the limit.
        SpecError: An argument is invalid, or a needed time is not profiled.
        PlanMismatch: A measured layer is missing from the profile.
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
    if cluster is None or gpus > MOST_SIMULATED:
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
        SpecError: One GPU cannot run ``batch``, the curve does not contain it, or the
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
    from stretto.burst.layer_profile import profile as measured

    return measured(module, example_inputs, **options)


def profile_on_ranks(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> LayerProfile:
    """Return a module's layer profile, measured on the ranks that train it. Collective.

    Without a process group one process measures the layers alone.

    The first rank measures the layers while the others wait. Then all ranks measure the
    executor's own calls, and how ranks that compute at the same time slow each other
    (``LayerProfile.host``); predictions include both. Every rank gets the same profile.

    Args:
        module: The module, on this rank's device.
        example_inputs: As for `profile`.
        process_group: The ranks; all ranks of the job if ``None``.
        options: Options of `stretto.burst.layer_profile.profile`.

    Raises:
        SpecError, NoisyProfile: On every rank, the error of the first rank's `profile`.
        StrettoError: On other ranks, if the first one's `profile` raised another error.
        CommTimeout: A rank was lost.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return profile(module, example_inputs, **options)

    from stretto.burst.host_costs import measure_host, slowdowns
    from stretto.burst.layer_profile import steps_of

    group = process_group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
    found: list[LayerProfile | StrettoError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [profile(module, example_inputs, **options)]
        except StrettoError as exc:
            found = [exc]
        except Exception as exc:
            text = (str(exc) or type(exc).__name__).splitlines()[0]
            found = [
                StrettoError(f"rank 0 can't profile: {type(exc).__name__}: {text}")
            ]
            dist.broadcast_object_list(found, group=group, group_src=0)
            raise
    dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], StrettoError):
        raise found[0]
    assert found[0] is not None  # noqa: S101 - the first rank has put it there
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with steps_of(module, example_inputs, **options) as (step, widths):
        slowed = slowdowns(group, device, step, widths)
    host = measure_host(group, device)
    return replace(found[0], host=replace(host, slowdowns=slowed))
