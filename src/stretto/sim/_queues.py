"""Simulate lanes as queues of equal flows, from event to event.

All flows have one rate at any time. So the loops do not count each flow's bytes, but
the bytes that any flow has been served since the beginning; a flow ends when that count
has grown by its size. Rates and speed are lists by the number of flows; index 0 of the
rates is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

_INF = float("inf")

Queue = tuple[Sequence[tuple[float, float, float]], int]
"""A lane's flows as (ready, bytes, start-up beyond the common one), and the number of
lanes with exactly these flows."""


def in_turn(
    queue: Queue,
    startup_s: float,
    rates: Sequence[float],
    ended_s: list[float] | None = None,
) -> float:
    """Return when the last flow ends on one lane, or on several with the same flows.

    ``ended_s`` receives the end of each.
    """
    flows, number = queue
    rate = rates[number]
    end = 0.0
    for ready_s, size, extra_s in flows:
        end = (ready_s if ready_s > end else end) + startup_s + extra_s + size / rate
        if ended_s is not None:
            ended_s.append(end)
    return end


def at_once(
    queues: Sequence[Queue],
    startup_s: float,
    rates: Sequence[float],
    ended_s: Sequence[list[float]] | None = None,
) -> float:
    """Return when the last flow of several lanes ends, computation undisturbed.

    The gradients' ready times are then known. ``ended_s`` receives the ends of each
    queue's flows.
    """
    position = [0] * len(queues)
    # When start-ups end, and the count of served bytes at which flows end.
    starts = sorted(
        (flows[0][0] + startup_s + flows[0][2], c)
        for c, (flows, _) in enumerate(queues)
    )
    ends: list[tuple[float, int]] = []
    now = served = 0.0
    sending = 0
    while True:
        if ends:
            goal = ends[0][0]
            rate = rates[sending]
            end_at = now + (goal - served) / rate
            if starts and starts[0][0] < end_at:
                start_at = starts[0][0]
                served += (start_at - now) * rate
                now = start_at
            else:
                served = goal
                now = end_at
                c = heappop(ends)[1]
                flows, number = queues[c]
                sending -= number
                if ended_s is not None:
                    ended_s[c].append(now)
                if not sending:
                    served = 0.0  # keeps the count exact over a long step
                position[c] += 1
                if position[c] < len(flows):
                    ready_s, _, extra_s = flows[position[c]]
                    if ready_s < now:
                        ready_s = now
                    heappush(starts, (ready_s + startup_s + extra_s, c))
                continue
        elif starts:
            now = starts[0][0]
        else:
            break
        c = heappop(starts)[1]
        flows, number = queues[c]
        heappush(ends, (served + flows[position[c]][1], c))
        sending += number
    return now


def beside_contention(
    queues: Sequence[Queue],
    startup_s: float,
    rates: Sequence[float],
    idle_rates: Sequence[float],
    speeds: Sequence[float],
    work_s: float,
    ended_s: Sequence[list[float]] | None = None,
) -> tuple[float, float]:
    """Return the end of several lanes beside computation that flows slow down.

    Returns when everything has ended, and when computation has. ``rates`` hold while
    computation runs, ``idle_rates`` after it. ``ended_s`` receives the ends of each
    queue's flows.
    """
    position = [0] * len(queues)
    # Work for which lanes wait, when start-ups end, the counts at which flows end.
    waiting = sorted((flows[0][0], c) for c, (flows, _) in enumerate(queues))
    starts: list[tuple[float, int]] = []
    ends: list[tuple[float, int]] = []
    now = served = done = work_end_s = 0.0
    sending = active = 0
    working = True
    while working or starts or ends:
        next_at, event = _INF, 0
        if ends:
            next_at, event = now + (ends[0][0] - served) / rates[sending], 1
        if starts and starts[0][0] < next_at:
            next_at, event = starts[0][0], 2
        if working:
            speed = speeds[active]
            target = waiting[0][0] if waiting else work_s
            if target > work_s:
                target = work_s
            work_at = now + (target - done) / speed
            if work_at < next_at:
                next_at, event = work_at, 3
                done = target
            else:
                done += (next_at - now) * speed
        if sending:
            served += (next_at - now) * rates[sending]
        now = next_at
        if event == 1:
            served, c = heappop(ends)
            flows, number = queues[c]
            sending -= number
            active -= number
            if ended_s is not None:
                ended_s[c].append(now)
            if not sending:
                served = 0.0
            position[c] += 1
            if position[c] < len(flows):
                heappush(waiting, (flows[position[c]][0], c))
        elif event == 2:
            c = heappop(starts)[1]
            flows, number = queues[c]
            heappush(ends, (served + flows[position[c]][1], c))
            sending += number
        elif done >= work_s:
            working = False
            work_end_s = now
            rates = idle_rates
        while waiting and (not working or waiting[0][0] <= done):
            c = heappop(waiting)[1]
            flows, number = queues[c]
            active += number
            heappush(starts, (now + startup_s + flows[position[c]][2], c))
    return now, work_end_s
