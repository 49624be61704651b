"""Step times over the number of ranks, from a few to a hundred thousand.

The number of ranks affects a step only through a collective's start-up and the bytes it
puts on the wire, so a point of the table costs one simulated step whatever its ranks.
`benchmarks/sim_speed.py` and its tests use it; no command does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.cost import cluster_at
from stretto.schema import Plan
from stretto.sim.bounds import lower_bound
from stretto.sim.forward_bounds import forward_bound_s, halves_bound_s
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.schema import Cluster, Workload

MAX_RANKS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOnRanks:
    """One step of a workload on a number of ranks."""

    ranks: int

    iteration_s: float

    exposed_communication_s: float

    num_buckets: int

    bound_s: float
    """No plan with this one's overlap and algorithms is faster at this point."""

    efficiency_ratio: float
    """Computation alone / step: throughput per rank relative to one rank's."""


def doubling_ranks(cluster: Cluster, *, max_ranks: int = MAX_RANKS) -> tuple[int, ...]:
    """Return 1, 2, 4, ... ranks on one host, then doubling up to ``max_ranks``.

    The last is ``max_ranks``, rounded down to whole hosts.
    """
    per_host = cluster.ranks_per_host
    within = [1 << i for i in range(per_host.bit_length()) if 1 << i < per_host]
    last = max(1, max_ranks // per_host)
    hosts = [1 << i for i in range(last.bit_length()) if 1 << i < last]
    return tuple(n for n in (*within, *(per_host * h for h in hosts), per_host * last))


def scaling(
    workload: Workload,
    cluster: Cluster,
    plan: Plan | Callable[[Workload, Cluster], Plan],
    *,
    ranks: Iterable[int] | None = None,
) -> tuple[StepOnRanks, ...]:
    """Return step times over the number of ranks.

    ``plan`` is one plan for all, or a function that makes one for each cluster (a
    planner's ``plan``). ``ranks``: `doubling_ranks` up to 100,000 by default.

    Raises:
        SpecError: ranks that do not fill hosts.
        PlanMismatch: the plan is for another workload.
    """
    points = []
    for count in doubling_ranks(cluster) if ranks is None else ranks:
        resized = cluster_at(cluster, count)
        if isinstance(plan, Plan):
            here = replace(plan, ranks=count, predicted=None)
        else:
            here = plan(workload, resized)
        result = simulate_step(workload, resized, here)
        compute_s = workload.forward_s + workload.backward_s
        algorithms = tuple(dict.fromkeys(b.algorithm for b in here.buckets))
        if here.overlap == "forward":
            bound_s = forward_bound_s(workload, resized, algorithms=algorithms)
        elif here.overlap == "halves":
            bound_s = halves_bound_s(workload, resized, algorithms=algorithms)
        else:
            bound_s = lower_bound(workload, resized, algorithms=algorithms).value_s
        points.append(
            StepOnRanks(
                ranks=count,
                iteration_s=result.iteration_s,
                exposed_communication_s=result.exposed_communication_s,
                num_buckets=len(here.buckets),
                bound_s=bound_s,
                efficiency_ratio=compute_s / result.iteration_s
                if result.iteration_s
                else 1.0,
            )
        )
    return tuple(points)
