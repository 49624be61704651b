"""LIBRA's recursion over stages (Eq. 7-15): one collective at a time beside backward.

Independent of the engine, so that each can be checked against the other: under
``backward`` overlap on one lane they agree to rounding.

It shares no code with what it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost import (
    collective_cost,
    compute_rate,
    curve_bytes_per_s,
    flow_rates,
)
from stretto.errors import SpecError
from stretto.sim.flows import STARTUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From the start of one group's collective to the start of the next one's."""

    overlapped_s: float
    """$t_o$: computation and communication both run."""

    compute_s: float
    """$t_b$: waiting for the next group's gradients."""

    communication_s: float
    """$t_c$: backward has ended and the collective has not."""


def stages(
    groups: Sequence[int],
    resources: Sequence[int],
    workload: Workload,
    cluster: Cluster,
    *,
    startup: str = "mixed",
) -> tuple[Stage, ...]:
    r"""Return every stage of backward, including stage 0 (the first group's
    computation).

    With $s$ the computation left when a collective of $c$ bytes and resource $r$
    starts, $\sigma = \alpha_1 - \alpha_2 r$, $p$ and $q$ its transmission beside
    computation and alone, $a$ its start-up:

    - $g = s/\sigma$ (Eq. 5), $t_o = \min(p + a, g)$ (Eq. 8);
    - remaining computation: $\hat s = s\,(1 - t_o/g)$ (Eq. 9, 14);
    - remaining communication, ``startup="mixed"``: $t_c = (q + a)(1 - t_o/(p + a))$
      (Eq. 10-11), as printed: the start-up is spread evenly over the message;
      ``"phase"``: $t_c = a - t_o + q$ where $t_o < a$, else $q\,(1 - (t_o - a)/p)$;
    - $t_b$: computation until the next group's last gradient (Eq. 13), at full speed.

    ``groups[i]`` is the index after the last tensor of group ``i`` in the order of
    readiness; ``resources[i]`` its resource. Groups of no bytes take no time. Rates are
    capped by one flow's highest rate on the cluster, as in `simulate_step`.

    Raises:
        SpecError: the groups omit tensors, ``startup`` is unknown, or the cluster has
            no ``contention``.
    """
    tensors = workload.tensors
    _check(groups, resources, len(tensors), startup)
    contention = cluster.contention
    if contention is None:
        raise SpecError(
            f"cluster {cluster.name!r} has no contention: fit or set it, or use "
            "simulate_step",
            place=".contention",
        )
    cost = collective_cost(cluster)
    max_bytes_per_s = flow_rates(cluster).per_flow_bytes_per_s(1)
    # Computation left once each group's last gradient is ready.
    after_s = [workload.backward_s - tensors[end - 1].ready_s for end in groups]
    firsts = [0, *groups][:-1]
    sizes = [
        sum(tensor.bytes for tensor in tensors[first:end])
        for first, end in zip(firsts, groups, strict=True)
    ]
    left_s = after_s[0]
    found = [
        Stage(
            overlapped_s=0.0,
            compute_s=workload.backward_s - left_s,
            communication_s=0.0,
        )
    ]
    for i, (size_bytes, resource) in enumerate(zip(sizes, resources, strict=True)):
        overlapped_s = residual_s = 0.0
        if size_bytes and cluster.ranks > 1:
            sigma = compute_rate(contention.compute, resource)
            beside_s, alone_s = (
                cost.wire_factor
                * size_bytes
                / min(max_bytes_per_s, curve_bytes_per_s(curve, resource))
                for curve in (contention.overlapped, contention.exclusive)
            )
            startup_s = cost.startup_s
            whole_s = beside_s + startup_s
            overlapped_s = min(whole_s, left_s / sigma)
            left_s = 0.0 if overlapped_s < whole_s else left_s - overlapped_s * sigma
            left_s = max(0.0, left_s)
            if overlapped_s < whole_s and startup == "mixed":
                residual_s = (alone_s + startup_s) * (1 - overlapped_s / whole_s)
            elif overlapped_s < startup_s:
                residual_s = startup_s - overlapped_s + alone_s
            elif overlapped_s < whole_s:
                residual_s = alone_s * (1 - (overlapped_s - startup_s) / beside_s)
        # The last group's stage ends with backward or with its collective.
        until_s = after_s[i + 1] if i + 1 < len(groups) else 0.0
        compute_s = max(0.0, left_s - until_s)
        left_s -= compute_s
        found.append(
            Stage(
                overlapped_s=overlapped_s,
                compute_s=compute_s,
                communication_s=residual_s,
            )
        )
    return tuple(found)


def stage_time_s(
    groups: Sequence[int],
    resources: Sequence[int],
    workload: Workload,
    cluster: Cluster,
    *,
    startup: str = "mixed",
) -> float:
    r"""Return backward's duration by LIBRA: $\sum_i t_o^i + t_b^i + t_c^i$ (Eq. 7).

    A step takes ``workload.forward_s`` more. Arguments and errors are as in `stages`.
    """
    found = stages(groups, resources, workload, cluster, startup=startup)
    return sum(s.overlapped_s + s.compute_s + s.communication_s for s in found)


def _check(
    groups: Sequence[int], resources: Sequence[int], num_tensors: int, startup: str
) -> None:
    if startup not in STARTUPS:
        raise SpecError(
            f"startup must be one of {', '.join(STARTUPS)}, got {startup!r}",
            place=".startup",
        )
    ascends = all(one < two for one, two in zip([0, *groups], groups, strict=False))
    if not groups or not ascends or groups[-1] != num_tensors:
        raise SpecError(
            f"groups must ascend to the number of tensors ({num_tensors}), "
            f"got {list(groups)}",
            place=".groups",
        )
    if len(resources) != len(groups):
        raise SpecError(
            f"resources must be one per group ({len(groups)}), got {len(resources)}",
            place=".resources",
        )
