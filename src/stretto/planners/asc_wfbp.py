"""ASC-WFBP: each gradient alone, merged, or beside the previous one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, final

from stretto.cost import flow_rates
from stretto.planners.base import AbstractPlanner, Draft, finish, linear_cost
from stretto.planners.fusion import FusionProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.base import LinearCost
    from stretto.schema import Cluster, Plan, Workload

NORMAL, SIMULTANEOUS = "normal", "simultaneous"


@final
class AscWfbpPlanner(AbstractPlanner):
    r"""ASC-WFBP's Algorithm 1 (INFOCOM 2021), a rule per gradient: a baseline.

    A group waits for the previous one (normal: same lane), absorbs the next gradient
    (merged), or is sent beside the previous one (simultaneous: the other of two lanes).
    The slow-down $\gamma$ of two flows is the cluster's, including its link's limit.

    By default the errors of the printed algorithm are fixed, see `determine_groups`.
    ``literal`` follows it as printed, where a group starts when it is ready whatever
    runs. Theorem 1 does not hold either way: the rules compare neighbors only.
    """

    name: ClassVar[str] = "asc-wfbp"

    def __init__(self, *, literal: bool = False) -> None:
        """Use Algorithm 1 with its errors fixed, or as printed."""
        self._literal = literal

    def plan(self, workload: Workload, cluster: Cluster) -> Plan:
        """Return Algorithm 1's groups on two lanes, or one if none is simultaneous."""
        cost = linear_cost(workload, cluster)
        rates = flow_rates(cluster)
        problem = FusionProblem(workload=workload, cost=cost)
        sent = [workload.tensors[i] for i in problem.sent]
        determine = printed_groups if self._literal else determine_groups
        groups = determine(
            [tensor.ready_s for tensor in sent],
            [tensor.bytes for tensor in sent],
            cost,
            rates.per_flow_bytes_per_s(1) / rates.per_flow_bytes_per_s(2),
            problem.firsts,
        )
        ends = problem.with_empty([group.end for group in groups])
        lanes = self._lanes(groups, ends, problem.sent)
        draft = Draft(
            ends=ends,
            slices=(1,) * len(ends),
            bucket_lanes=lanes,
            lanes=1 + max(lanes),
        )
        return finish(draft, self.name, workload, cluster)

    @staticmethod
    def _lanes(
        groups: Sequence[AscGroup], ends: Sequence[int], sent: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the lane of each bucket; any lane serves a bucket without bytes."""
        number_of = {sent[group.end - 1]: i for i, group in enumerate(groups)}
        lane, lanes = 0, []
        for begin, end in pairwise((0, *ends)):
            held = [number_of[i] for i in range(begin, end) if i in number_of]
            if held and held[0] and groups[held[0]].kind == SIMULTANEOUS:
                lane = 1 - lane
            lanes.append(lane)
        return tuple(lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AscGroup:
    """Gradients sent together, and their times by the algorithm's own estimate."""

    end: int
    """Exclusive index of its last gradient."""

    kind: str

    start_s: float

    end_s: float


def penalty_s(
    size_bytes: float,
    running_bytes: float,
    running_for_s: float,
    cost: LinearCost,
    gamma: float,
    *,
    capped: bool = True,
) -> float:
    r"""Return the time that a message loses to one under way: Eq. 12, 13.

    $(\gamma - 1)\, b\, \min(m_1 (1 - \Delta / (a + b m_1)), m_2)$ with $m_1$ =
    ``running_bytes`` under way for $\Delta$ = ``running_for_s`` and $m_2$ =
    ``size_bytes``. As printed (``capped`` false), the later message may overlap with
    more bytes than it has, and with one that has ended.
    """
    alone_s = cost.of(running_bytes)
    if not alone_s:
        return 0.0
    overlapped = running_bytes * (1.0 - running_for_s / alone_s)
    if capped:
        overlapped = max(0.0, min(overlapped, size_bytes))
    return (gamma - 1.0) * cost.s_per_byte * overlapped


def determine_groups(
    ready_s: Sequence[float],
    sizes_bytes: Sequence[float],
    cost: LinearCost,
    gamma: float,
    firsts: Sequence[int] | None = None,
) -> tuple[AscGroup, ...]:
    r"""Run Algorithm 1 with its errors fixed: Q1 to Q3 for each gradient in order.

    With $\tau$ the start of the open group if it waits for the previous group, $r$ the
    time at which it is ready, $r'$ that of the next gradient, $t = a + b m$:

    - Q1, $\tau + t \le r'$: normal.
    - else Q2, $r' < \tau + a$, and not Q3, $r + t + penalty < r'$: merged.
    - else simultaneous: it starts at $r$, or when its lane is free.

    Differences from the print: Q1 has $\tau_b^{(l-1)}$ as in Eq. 21, Q3 has
    $\tau_b^{(l)}$ as in Eq. 17; a normal group starts after the previous one
    (Definition 1); "the previous one" is the previous group, not a merged layer; the
    penalty has a cap, and is zero for the first group; at most two groups are under
    way. Gradients are merged only from ``firsts[i]`` on. O(L).
    """
    groups: list[AscGroup] = []
    size_before = size = 0.0
    begin = 0
    lane_free_s = [0.0, 0.0]  # that of the previous group, and the other
    for i, ready in enumerate(ready_s):
        size += sizes_bytes[i]
        alone_s = cost.of(size)
        before = groups[-1] if groups else None
        start_s = max(ready, before.end_s) if before else ready
        beside_s = max(ready, lane_free_s[1])
        lost_s = 0.0
        if before and before.end_s > beside_s:
            lost_s = penalty_s(
                size, size_before, beside_s - before.start_s, cost, gamma
            )
        kind = SIMULTANEOUS
        if i + 1 < len(ready_s):
            after = ready_s[i + 1]
            if start_s + alone_s <= after:
                kind = NORMAL
            elif (
                after < start_s + cost.startup_s
                and not ready + alone_s + lost_s < after
                and (firsts is None or firsts[i + 1] <= begin)
            ):
                continue
        if kind == NORMAL or before is None or beside_s >= before.end_s:
            kind, lost_s, beside_s = NORMAL, 0.0, start_s
        else:
            lane_free_s.reverse()
        lane_free_s[0] = beside_s + alone_s + lost_s
        groups.append(
            AscGroup(
                end=i + 1,
                kind=kind,
                start_s=beside_s,
                end_s=lane_free_s[0],
            )
        )
        size_before, size, begin = size, 0.0, i + 1
    return tuple(groups)


def printed_groups(
    ready_s: Sequence[float],
    sizes_bytes: Sequence[float],
    cost: LinearCost,
    gamma: float,
    firsts: Sequence[int] | None = None,
) -> tuple[AscGroup, ...]:
    """Run Algorithm 1 as printed, in the order of readiness: for study.

    Where the print leaves values undefined: no penalty without a previous layer, and
    the first layer's backward begins at 0. The last layer is simultaneous (line 18).
    """
    number = len(ready_s)
    sizes = list(sizes_bytes)
    begins = [0.0, *ready_s[:-1]]
    groups: list[AscGroup] = []
    for i, ready in enumerate(ready_s):
        lost_s = 0.0
        if i and sizes[i - 1]:
            lost_s = penalty_s(
                sizes[i],
                sizes[i - 1],
                ready - ready_s[i - 1],
                cost,
                gamma,
                capped=False,
            )
        alone_s = cost.of(sizes[i])
        kind = SIMULTANEOUS
        if i + 1 < number:
            after = ready_s[i + 1]
            may_merge = firsts is None or firsts[i + 1] <= i
            if ready + alone_s <= begins[i] + after - ready:  # line 8
                kind = NORMAL
            elif (
                after < ready + cost.startup_s
                and not ready + (ready - begins[i]) + alone_s + lost_s < after
                and may_merge
            ):
                sizes[i + 1] += sizes[i]
                sizes[i] = 0
                continue
        if kind == NORMAL:
            lost_s = 0.0
        groups.append(
            AscGroup(
                end=i + 1, kind=kind, start_s=ready, end_s=ready + alone_s + lost_s
            )
        )
    return tuple(groups)
