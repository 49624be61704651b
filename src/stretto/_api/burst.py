"""Burst planning, wired together."""

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
"""Parts of synchronisation that a candidate plan is searched for."""

NEAR_RATIO = 0.02
"""Of plans whose simulated steps are so near the shortest, which profiles do not tell
apart, the one is taken that computes least."""

MOST_SIMULATED = 64
"""Up to so many GPUs plans are compared by simulated steps."""


def problem(
    profile: LayerProfile,
    *,
    gpus: int,
    batch: int,
    amplification_limit: float | None = None,
    widths: str | Sequence[int] = "powers",
    cluster: Cluster | None = None,
) -> BurstProblem:
    """A burst planning problem.

    Args:
        profile: layers and their times.
        gpus: how many a plan may use.
        batch: samples of an iteration over all GPUs.
        amplification_limit: of each layer's GPU time against that on one GPU.
        widths: the numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``,
            or numbers that divide ``gpus``.
        cluster: gives the network; without one it is DeepPool's published constants.

    Raises:
        SpecError: a limit below 1, or a width that breaks its rule.
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
    """The fastest plan within the limit.

    Raises:
        Infeasible: none keeps the limit; the nearest limit that one keeps is named.
        SpecError: a needed time is not profiled.
    """
    return planning.plan(problem)


def front(problem: BurstProblem) -> list[BurstPlan]:
    """The plans between which time is bought with GPU time, the fastest first.

    Raises:
        Infeasible: none keeps the limit; the nearest limit that one keeps is named.
        SpecError: a needed time is not profiled.
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
    """A plan's step on a cluster, event by event; see `simulate_burst`.

    ``shares`` are the samples that each rank comes with; equal ones where absent.
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
    """The samples of each rank, as equal as can be, the first ranks' more."""
    return tuple(-(-(batch - i) // gpus) for i in range(gpus))


def plan_on(
    problem: BurstProblem, cluster: Cluster, **options: Any
) -> tuple[BurstPlan, BurstStep]:
    """The plan with about the shortest simulated step, and that step.

    The search counts a layer's synchronisation as if it came after its backward;
    really some of it is under other layers' backward. So plans are searched for several
    parts of it that count, plans of one width are added, each is simulated, and the
    fastest stays, or one that computes less and is as fast within `NEAR_RATIO`. With a
    limit only plans that keep it with all of it counted are among them. The prediction
    is the simulation's.

    Args:
        problem: from `problem`, for this cluster.
        cluster: where it runs.
        options: of `simulate`: ``bucket_bytes``, ``lanes``, ``cores``.

    Raises:
        Infeasible: none keeps the limit; the nearest limit that one keeps is named.
        SpecError: a needed time is not profiled.
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
        raise AssertionError("a planner's plan carries its prediction")
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
        profile: of the model's layers, from `profile_layers` or `stretto burst
            profile`.
        gpus: ranks to use.
        batch: samples of a step over all ranks.
        cluster: the network, from `stretto.probe` or a file; DeepPool's published
            constants if ``None``.
        measured: what ranks measured of layers in training
            (`BurstParallel.measured`, of all ranks together), used in place of the
            profile's times.
        amplification_limit: the most GPU time of a layer against that on one GPU.
        widths: the numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``,
            or numbers.
        cores: processors that all ranks of an emulated cluster share.

    Raises:
        Infeasible: no plan keeps the limit.
        SpecError: an argument is invalid, or a needed time is not profiled.
        PlanMismatch: a measured layer is not in the profile.
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
    """Weak, strong, batch-optimal and burst scaling; see `scaling`.

    The network is the cluster's, resized to each number of GPUs; without one
    DeepPool's published constants, with another bandwidth where it is given.

    Raises:
        SpecError: one GPU can't run ``batch``, the curve does not have it, or the GPUs
            do not fill the cluster's hosts.
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
    """The layer profile of a module; see `stretto.burst.measure.profile`."""
    from stretto.burst.measure import profile as measured

    return measured(module, example_inputs, **options)


def profile_on_ranks(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> LayerProfile:
    """The layer profile of a module on the ranks that will train it. Collective.

    Without a process group one process measures the layers alone.

    The first rank measures the layers while the others wait; then all measure what the
    executor's own calls take and how ranks that compute at once slow each other
    (``LayerProfile.host``), which predictions count. Every rank gets the same profile.

    Args:
        module: on this rank's device.
        example_inputs: as `profile`.
        process_group: the ranks; ``None``: all of the job.
        options: of `stretto.burst.measure.profile`.

    Raises:
        SpecError, NoisyProfile: on every rank, what the first rank's `profile` raised.
        StrettoError: on other ranks, the first one's `profile` raised another error.
        CommTimeout: a rank was lost.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return profile(module, example_inputs, **options)

    from stretto.burst.measure import steps_of
    from stretto.burst.messages import measure_host
    from stretto.burst.together import slowdowns

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
