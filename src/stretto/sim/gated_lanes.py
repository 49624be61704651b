"""The step model's loops for overlap ``forward``: lanes that forward waits for.

Called by `StepModel`; the reference is `stretto.sim.forward`. Time and work begin with
backward. All flows have ended when forward ends, because it waits for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from stretto.sim.lanes import LaneFlow, multi_lane, single_lane

if TYPE_CHECKING:
    from stretto.sim.network import Network

_INF = float("inf")
_END, _START, _WORK = range(3)


@dataclass(frozen=True, slots=True)
class GatedQueue:
    """A lane's flows, at least one, in launch order."""

    flows: Sequence[LaneFlow]

    needed_s: Sequence[float]
    """By flow: when forward first needs its bucket, from the start of forward."""

    number: int
    """How many lanes have exactly these flows."""


def period_s(
    queues: Sequence[GatedQueue],
    network: Network,
    *,
    lanes: int,
    backward_s: float,
    forward_s: float,
) -> float:
    """Return the time of a backward and the next forward, which waits for flows.

    Args:
        queues: what the lanes send; flows are ready after work within backward.
        network: figures of the cluster.
        lanes: at least the number of lanes with flows.
        backward_s: its computation.
        forward_s: its computation.
    """
    if not queues:
        return backward_s + forward_s
    if network.contended:
        return _beside_work(queues, network, backward_s, forward_s)
    rates = network.at(0, lanes).rates
    plain = [(queue.flows, queue.number) for queue in queues]
    ended_s: list[list[float]] = [[] for _ in queues]
    if len(plain) == 1:
        single_lane(plain[0], rates, ended_s[0])
    else:
        multi_lane(plain, rates, ended_s)
    # Where nothing slows computation, forward is late by the latest flow's delay.
    late_s = max(
        end_s - needed_s
        for ends, queue in zip(ended_s, queues, strict=True)
        for end_s, needed_s in zip(ends, queue.needed_s, strict=True)
    )
    return forward_s + max(backward_s, late_s)


def _beside_work(
    queues: Sequence[GatedQueue],
    network: Network,
    backward_s: float,
    forward_s: float,
) -> float:
    """Return the period where flows, of any levels of resource, slow computation.

    As `stretto.sim.lanes.mixed_lanes_beside_work`. While forward waits, flows are as
    fast as after computation.
    """
    loads, units, speeds = network.loads, network.units, network.speeds
    work_s = backward_s + forward_s
    # Where forward waits, and for how many flows still.
    gates = sorted({needed_s for queue in queues for needed_s in queue.needed_s})
    awaited = dict.fromkeys(gates, 0)
    for queue in queues:
        for needed_s in queue.needed_s:
            awaited[needed_s] += 1
    gate = 0
    position = [0] * len(queues)
    # Work for which lanes wait, and when start-ups end.
    waiting = [(queue.flows[0][0], c) for c, queue in enumerate(queues)]
    heapify(waiting)
    starts: list[tuple[float, int]] = []
    # By level: the bytes served, and the counts at which flows end.
    served = [0.0] * len(loads)
    ends: list[list[tuple[float, int]]] = [[] for _ in loads]
    busy: list[int] = []  # levels of which flows send
    sending = load = 0
    rates: tuple[float, ...] = ()
    now = served_at = done = 0.0
    end_at, ending = _INF, 0  # the next flow's end, and its level
    stalled, speed = False, 1.0
    while True:
        next_at, event = end_at, _END
        if starts and starts[0][0] < next_at:
            next_at, event = starts[0][0], _START
        if not stalled:
            target = backward_s + gates[gate] if gate < len(gates) else work_s
            if waiting and waiting[0][0] < target:
                target = waiting[0][0]
            work_at = now + (target - done) / speed
            if work_at < next_at:
                next_at, event, done = work_at, _WORK, target
            else:
                done += (next_at - now) * speed
        now = next_at
        elapsed_s, served_at = now - served_at, now
        for level in busy:
            served[level] += elapsed_s * rates[level]
        if event == _END:
            served[ending], c = heappop(ends[ending])
            queue = queues[c]
            sending -= queue.number * units[ending]
            load -= queue.number * loads[ending]
            awaited[queue.needed_s[position[c]]] -= 1
            if not ends[ending]:
                busy.remove(ending)
                served[ending] = 0.0  # keeps the count exact over a long step
            position[c] += 1
            if position[c] < len(queue.flows):
                heappush(waiting, (queue.flows[position[c]][0], c))
        elif event == _START:
            c = heappop(starts)[1]
            _, _, size, level = queues[c].flows[position[c]]
            if not ends[level]:
                busy.append(level)
            heappush(ends[level], (served[level] + size, c))
            sending += queues[c].number * units[level]
        while waiting and waiting[0][0] <= done:
            c = heappop(waiting)[1]
            _, startup_s, _, level = queues[c].flows[position[c]]
            load += queues[c].number * loads[level]
            heappush(starts, (now + startup_s, c))
        while gate < len(gates) and backward_s + gates[gate] <= done:
            if awaited[gates[gate]]:
                break
            gate += 1
        stalled = gate < len(gates) and backward_s + gates[gate] <= done
        if gate == len(gates) and done >= work_s:
            return now
        end_at = _INF
        if busy:
            rates = (network.idle_rates if stalled else network.rates)[sending]
            for level in busy:
                at = now + (ends[level][0][0] - served[level]) / rates[level]
                if at < end_at:
                    end_at, ending = at, level
        speed = speeds[load]
