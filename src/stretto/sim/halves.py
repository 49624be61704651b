"""Overlap with the next forward by halves of all-reduces, as in DeAR, to compare with.

A bucket's gradients are reduced and scattered during backward, and gathered during the
next forward, which waits at a tensor's first use (``needed_s``) until its bucket is
complete. Reduce-scatters launch as buckets become ready, in the plan's order;
all-gathers launch after all of them, in the order of need. Each bucket takes the same
lanes both times. All-gathers do not use gaps in which lanes wait for gradients, so a
job whose communication backward hides anyway may be slower than with overlap
``backward``.

Periods are steady for the reason given in `stretto.sim.forward`. `simulate_step` calls
`simulate_halves`. The runtime does not send halves.

Source: Zhang et al., DeAR, ICDCS 2023, section III.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.sim.engine import Gate
from stretto.sim.flows import plan_flows
from stretto.sim.forward import needs_of, run_period

if TYPE_CHECKING:
    from stretto.schema import Cluster, Plan, Workload
    from stretto.sim.forward import Period


def simulate_halves(
    workload: Workload, cluster: Cluster, plan: Plan, *, startup: str = "phase"
) -> Period:
    """Return the steady period of steps whose all-gathers run beside the next forward.

    The plan's ranks and tensors must have been checked.

    Raises:
        SpecError: the plan requests a resource that the cluster does not list.
    """
    scatters, sent = plan_flows(
        workload, cluster, plan, origin_s=0.0, part="reduce_scatter", startup=startup
    )
    needed_s = needs_of(workload, plan)
    order = sorted(
        range(len(scatters)), key=lambda i: (needed_s[sent[i].bucket], -sent[i].bucket)
    )
    launched_s = max((flow.ready_work_s for flow in scatters), default=0.0)
    # An all-gather sends back the bytes of its reduce-scatter.
    gathers = [replace(scatters[i], ready_work_s=launched_s) for i in order]
    awaited: dict[int, list[int]] = {}
    for number, i in enumerate(order, start=len(scatters)):
        awaited.setdefault(sent[i].bucket, []).append(number)
    slices = [replace(part, name=f"{part.name} reduce-scatter") for part in sent]
    slices += [replace(sent[i], name=f"{sent[i].name} all-gather") for i in order]
    return run_period(
        workload,
        cluster,
        plan,
        flows=scatters + gathers,
        slices=slices,
        gates=[
            Gate(work_s=workload.backward_s + needed_s[bucket], flows=tuple(numbers))
            for bucket, numbers in awaited.items()
        ],
    )
