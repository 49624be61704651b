"""Burst plans: the fastest within a limit, or the nearest feasible limit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stretto.errors import Infeasible
from stretto.planners.burst.crossing import shortest_crossing
from stretto.planners.burst.cuts import expanded, joined
from stretto.planners.burst.edges import EdgeCost
from stretto.planners.burst.evaluate import evaluate
from stretto.planners.burst.front import front
from stretto.planners.burst.problem import Choice
from stretto.planners.burst.search import shortest
from stretto.schema.burst import BurstPlan, BurstPrediction, LayerGpus

if TYPE_CHECKING:
    from stretto.planners.burst.problem import BurstProblem, Floats


def plan(problem: BurstProblem) -> BurstPlan:
    """Return the fastest plan within the amplification limit, exact under the model.

    For a graph whose branches cross, `crossing` says what is exact. O(L n log n) for
    a chain of L layers and n widths; see `BurstProblem.of` for n.

    Raises:
        Infeasible: no plan keeps the limit; the message names the nearest feasible one.
        SpecError: a needed time is not profiled.
    """
    found = (shortest_crossing if problem.crosses else shortest)(problem)
    if found is None:
        raise _infeasible(problem)
    return plan_of(problem, found[1])


def plans_of_front(problem: BurstProblem) -> list[BurstPlan]:
    """Return the Pareto front of step time and GPU time, the fastest first.

    See `front` for what is exact.

    Raises:
        Infeasible: no plan keeps the limit; the message names the nearest feasible one.
        SpecError: a needed time is not profiled.
    """
    if problem.crosses:
        whole, groups = joined(problem.profile)
        found = front(replace(problem, profile=whole))
        found = [(cost, expanded(choice, groups)) for cost, choice in found]
    else:
        found = front(problem)
    if not found:
        raise _infeasible(problem)
    return [plan_of(problem, choice) for _, choice in found]


def _infeasible(problem: BurstProblem) -> Infeasible:
    limit, nearest = problem.amplification_limit, nearest_limit(problem)
    return Infeasible(
        f"no plan for {problem.profile.name!r} keeps every layer's GPU time within "
        f"{limit:g} times that on one GPU: the nearest feasible limit is "
        f"{_rounded_up(nearest):.6g}. Use that limit or a higher one"
    )


def plan_of(problem: BurstProblem, choice: Choice) -> BurstPlan:
    """Return a choice as a plan, with its prediction."""
    cost = evaluate(problem, choice)
    alone = same_width_times(problem)
    width = min(alone, key=lambda gpus: (alone[gpus], gpus))
    single_s = sum(problem.single_s)
    busy_s = sum(
        float(problem.node_s[i, at]) * problem.widths[at]
        for i, at in enumerate(choice.widths)
    )
    first = choice.first_gpus or (0,) * len(choice.widths)
    return BurstPlan(
        profile_digest=problem.profile.digest,
        gpus=problem.gpus,
        batch=problem.batch,
        amplification_limit=problem.amplification_limit,
        layers=tuple(
            LayerGpus(layer=layer.name, gpus=problem.widths[at], first_gpu=gpu)
            for layer, at, gpu in zip(
                problem.profile.layers, choice.widths, first, strict=True
            )
        ),
        predicted=BurstPrediction(
            iteration_s=cost.iteration_s,
            gpu_s=cost.gpu_s,
            amplification=cost.gpu_s / single_s if single_s > 0 else 0.0,
            max_amplification=cost.max_amplification,
            data_parallel_s=alone[problem.widths[-1]],
            single_width=width,
            single_width_s=alone[width],
            idle_gpu_s=max(0.0, problem.gpus * cost.iteration_s - busy_s),
        ),
    )


def same_width_times(problem: BurstProblem) -> dict[int, float]:
    """Return the step time with all layers on the same number of GPUs, by number.

    Nothing moves then, so it is the sum of the layers.
    """
    times_s = problem.node_s.sum(axis=0).tolist()
    return dict(zip(problem.widths, times_s, strict=True))


def same_width(problem: BurstProblem, gpus: int) -> BurstPlan:
    """Return the plan with every layer on ``gpus`` GPUs: plain data parallelism."""
    at = problem.widths.index(gpus)
    return plan_of(problem, Choice(widths=(at,) * len(problem.profile.layers)))


def nearest_limit(problem: BurstProblem) -> float:
    """Return the smallest amplification limit that some plan keeps, exactly.

    Bisects over the amplifications of all edges and widths: one of them is the limit,
    and a higher limit never forbids a plan that a lower one allows.
    """
    if problem.crosses:
        problem = replace(problem, profile=joined(problem.profile)[0])
    free = replace(problem, amplification_limit=None)
    widths = np.array(problem.widths, float)
    found = [_amplifications(free, problem.tree.source, 0.0 * widths, widths)]
    number = {layer.name: i for i, layer in enumerate(problem.profile.layers)}
    for target, layer in enumerate(problem.profile.layers):
        for name in layer.inputs:
            edge = EdgeCost(free, number[name], target, moved=False)
            found.append(_amplifications(free, target, edge.dense_hk, widths))
    limits = np.unique(np.concatenate(found))
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        tried = replace(problem, amplification_limit=float(limits[middle]))
        if shortest(tried) is None:
            low = middle + 1
        else:
            high = middle
    return float(limits[low])


def _amplifications(
    problem: BurstProblem,
    layer: int,
    comm_s: Floats,
    widths: Floats,
) -> Floats:
    single_s = problem.single_s[layer]
    if single_s <= 0:
        return np.empty(0)
    busy_s: Floats = (comm_s + problem.node_s[layer]) * widths
    return busy_s.ravel() / single_s


def _rounded_up(value: float) -> float:
    """Return the number rounded up to six digits."""
    scale = 10.0 ** (5 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale
