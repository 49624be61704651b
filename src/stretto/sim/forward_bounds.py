"""Periods that no plan whose communication extends into the next forward can beat.

Called by `stretto.sim.scope` for a family of plans, and by `stretto.sim.scaling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.cost import collective_cost, flow_rates
from stretto.sim.bounds import best_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster, TensorSpec, Workload


def forward_bound_s(
    workload: Workload,
    cluster: Cluster,
    *,
    algorithms: Sequence[str] = ("ring",),
    max_lanes: int | None = None,
) -> float:
    r"""Return a period that no plan with overlap ``forward`` can beat.

    With forward $t_f$, backward $t_b$, gradient $l$ of $m_l$ bytes ready at $\tau_l$ of
    backward and needed at $n_l$ of forward, least start-up $a$, least wire factor
    $\rho$, and $X$ the highest total rate of up to ``max_lanes`` flows:

    $\max(t_f + t_b,\; \max_{\tau, n}\; \tau + a
    + \frac{\rho}{X} \sum_{l: \tau_l \ge \tau,\, n_l \le n} m_l + t_f - n)$

    Gradients that are ready no earlier than $\tau$ and needed by $n$ travel between
    these two points of the computation, and the first of their bytes after a start-up.
    Before $\tau$ and after $n$ remains computation that takes as long as measured, or
    longer beside communication. One gradient alone gives the circle: from its first use
    around to its next first use. All together give the link's limit.

    Holds for whole all-reduces in any buckets, lanes, slices and launch order.
    O(L log L) for L tensors.
    """
    compute_s = workload.forward_s + workload.backward_s
    sent = [tensor for tensor in workload.tensors if tensor.bytes]
    if cluster.ranks == 1 or not sent:
        return compute_s
    costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
    startup_s = min(cost.min_startup_s for cost in costs)
    factor = min(cost.wire_factor for cost in costs)
    s_per_byte = factor / best_bytes_per_s(cluster, max_lanes)
    return max(
        compute_s, workload.forward_s + startup_s + _longest_cut_s(sent, s_per_byte)
    )


def _longest_cut_s(tensors: Sequence[TensorSpec], s_per_byte: float) -> float:
    """Return the most of tau + (bytes between) * s_per_byte - n, over all tau and n.

    Tensors join from the last ready one on. A tree over the needs, in their order, has
    in each node the sum of its leaves and the largest sum of some first ones of them,
    where a leaf is what a need's own bytes and its distance from the need before add.
    Only needs of tensors that have joined end such a sum: others bound nothing.
    """
    needs = sorted({tensor.needed_s for tensor in tensors})
    place = {needed_s: i for i, needed_s in enumerate(needs)}
    size = 1 << (len(needs) - 1).bit_length()
    total = [0.0] * (2 * size)
    largest = [-float("inf")] * (2 * size)
    for i, needed_s in enumerate(needs):
        total[size + i] = (needs[i - 1] if i else 0.0) - needed_s
    for node in range(size - 1, 0, -1):
        _join(total, largest, node)
    longest_s = -float("inf")
    for i in range(len(tensors) - 1, -1, -1):
        tensor = tensors[i]
        node = size + place[tensor.needed_s]
        total[node] += tensor.bytes * s_per_byte
        largest[node] = total[node]
        while node > 1:
            node //= 2
            _join(total, largest, node)
        longest_s = max(longest_s, tensor.ready_s + largest[1])
    return longest_s


def _join(total: list[float], largest: list[float], node: int) -> None:
    left, right = 2 * node, 2 * node + 1
    total[node] = total[left] + total[right]
    largest[node] = max(largest[left], total[left] + largest[right])


def halves_bound_s(
    workload: Workload, cluster: Cluster, *, algorithms: Sequence[str] = ("ring",)
) -> float:
    r"""Return a period that no plan with overlap ``halves`` can beat.

    $\max(t_f + t_b,\; M\rho/X,\;
    \max_l t_f - n_l + \tau_l + a/2 + \max(a/2, \rho m_l/X))$

    with tensor $l$ of $m_l$ bytes ready at $\tau_l$ of backward and needed at $n_l$ of
    forward, $M$ all bytes, $X$ the highest total rate of any number of flows. The last
    term is the cycle through one tensor: from its first use forward and backward reach
    its gradient, which must be reduced and gathered before the next first use. Only one
    of the two start-ups is sure to send nothing: slices may send during each other's.

    $\max(t_f + t_b, M\rho/B) + a$, sometimes given as the bound, holds for whole
    buckets on one lane where the last gradient is needed first, but not always.
    """
    forward_s, backward_s = workload.forward_s, workload.backward_s
    if cluster.ranks == 1:
        return forward_s + backward_s
    costs = [collective_cost(cluster, algorithm) for algorithm in algorithms]
    startup_s = min(cost.min_startup_s for cost in costs)
    factor = min(cost.wire_factor for cost in costs)
    max_bytes_per_s = flow_rates(cluster).best_total_bytes_per_s()
    circle_s = max(
        (
            forward_s
            - tensor.needed_s
            + tensor.ready_s
            + startup_s / 2
            + max(startup_s / 2, factor * tensor.bytes / max_bytes_per_s)
            for tensor in workload.tensors
            if tensor.bytes
        ),
        default=0.0,
    )
    return max(
        forward_s + backward_s,
        factor * workload.total_bytes / max_bytes_per_s,
        circle_s,
    )
