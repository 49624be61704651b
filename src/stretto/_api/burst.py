"""Burst planning, wired together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.cost.burst import DEEPPOOL, BurstNetwork
from stretto.planners.burst import plan as planning
from stretto.planners.burst.problem import BurstProblem

if TYPE_CHECKING:
    from stretto.schema import Cluster
    from stretto.schema.burst import BurstPlan, LayerProfile


def problem(
    profile: LayerProfile,
    *,
    gpus: int,
    batch: int,
    amplification_limit: float | None = None,
    widths: str = "powers",
    cluster: Cluster | None = None,
) -> BurstProblem:
    """A burst planning problem.

    Args:
        profile: layers and their times.
        gpus: how many a plan may use.
        batch: samples of an iteration over all GPUs.
        amplification_limit: of each layer's GPU time against that on one GPU.
        widths: the numbers of GPUs a layer may get: ``powers``, ``divisors``, ``all``.
        cluster: gives the network; without one it is DeepPool's published constants.
    """
    network = DEEPPOOL if cluster is None else BurstNetwork.of(cluster, gpus)
    return BurstProblem.of(
        profile,
        network,
        gpus=gpus,
        batch=batch,
        widths=widths,
        amplification_limit=amplification_limit,
    )


def plan(problem: BurstProblem) -> BurstPlan:
    """The fastest plan within the limit.

    Raises:
        Infeasible: none keeps the limit; the nearest limit that one keeps is named.
        SpecError: the graph is not series-parallel, or a needed time is not profiled.
    """
    return planning.plan(problem)


def front(problem: BurstProblem) -> list[BurstPlan]:
    """The plans between which time is bought with GPU time, the fastest first.

    Raises:
        Infeasible: none keeps the limit; the nearest limit that one keeps is named.
        SpecError: the graph is not series-parallel, or a needed time is not profiled.
    """
    return planning.plans_of_front(problem)
