"""When flows on lanes end: the step model's loops, without objects per flow.

`run_lanes` chooses a loop: for one queue or several, with computation undisturbed or
slowed, by flows of one level or of several. Each gives what `stretto.sim.engine` gives
for one link, faster: one queue is a chain of closed forms, where computation is
undisturbed ready times are known in advance, and flows of one level have one rate.
Called by `stretto.sim.step_model` and `stretto.sim.gated_lanes`.

Flows of one level have one rate at any time. So the loops over several queues do not
count each flow's bytes but, by level, the bytes that any flow of that level has been
served; a flow ends when that count has grown by its size.

All loops append the end of each flow of queue ``i`` to ``ended_s[i]``, if it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.sim.network import LevelFigures, Network

_INF = float("inf")
_END, _START, _WORK = range(3)

LaneFlow = tuple[float, float, float, int]
"""Work after which it is ready, start-up (s), bytes on the wire, level of resource."""

Queue = tuple[Sequence[LaneFlow], int]
"""A lane's flows, at least one, and the number of lanes with exactly these flows: lanes
whose queues are equal stay equal and are simulated as one."""


def run_lanes(
    queues: Sequence[Queue],
    network: Network,
    work_s: float,
    *,
    lanes: int,
    level: int | None,
    ended_s: Sequence[list[float]] | None = None,
) -> tuple[float, float]:
    """Return when flows and computation have ended, and when computation has.

    Args:
        queues: what the lanes send.
        network: figures of the cluster.
        work_s: computation, which starts at time 0.
        lanes: at least the number of lanes with flows.
        level: of all flows; ``None`` if they differ.
        ended_s: receives the end of each flow, by queue.
    """
    if not queues:
        return work_s, work_s
    if len(queues) == 1:
        only_s = None if ended_s is None else ended_s[0]
        if network.contended:
            return single_lane_beside_work(queues[0], network, work_s, only_s)
        end_s = single_lane(queues[0], network.at(0, lanes).rates, only_s)
    elif network.contended:
        if level is None:
            return mixed_lanes_beside_work(queues, network, work_s, ended_s)
        return multi_lane_beside_work(queues, network.at(level, lanes), work_s, ended_s)
    else:
        end_s = multi_lane(queues, network.at(0, lanes).rates, ended_s)
    return (end_s if end_s > work_s else work_s), work_s


def single_lane(
    queue: Queue, rates: Sequence[float], ended_s: list[float] | None = None
) -> float:
    """Return when the last flow ends on one lane, or on several with the same flows.

    Computation is undisturbed. ``rates`` are by number of flows.
    """
    flows, number = queue
    rate = rates[number]
    end = 0.0
    for ready_s, startup_s, size, _ in flows:
        end = (ready_s if ready_s > end else end) + startup_s + size / rate
        if ended_s is not None:
            ended_s.append(end)
    return end


def multi_lane(
    queues: Sequence[Queue],
    rates: Sequence[float],
    ended_s: Sequence[list[float]] | None = None,
) -> float:
    """Return when the last flow of several lanes ends.

    Computation is undisturbed. ``rates`` are by number of flows.
    """
    position = [0] * len(queues)
    # When start-ups end, and the count of served bytes at which flows end.
    starts = sorted(
        (flows[0][0] + flows[0][1], c) for c, (flows, _) in enumerate(queues)
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
                    ready_s, startup_s, _, _ = flows[position[c]]
                    if ready_s < now:
                        ready_s = now
                    heappush(starts, (ready_s + startup_s, c))
                continue
        elif starts:
            now = starts[0][0]
        else:
            break
        c = heappop(starts)[1]
        flows, number = queues[c]
        heappush(ends, (served + flows[position[c]][2], c))
        sending += number
    return now


def single_lane_beside_work(
    queue: Queue, network: Network, work_s: float, ended_s: list[float] | None = None
) -> tuple[float, float]:
    """Return when one queue and computation have ended, and when computation has.

    Flows slow computation. The stages are LIBRA's (Eq. 8-11), but nothing is sent in a
    start-up.
    """
    flows, number = queue
    figures = [
        (at.rates[number], at.idle_rates[number], at.speeds[number])
        for at in (network.at(level, number) for level in range(len(network.loads)))
    ]
    now = done = 0.0
    work_end_s = 0.0  # or, while computation runs, some time before its end
    for ready_s, startup_s, size, level in flows:
        rate, idle_rate, speed = figures[level]
        if done < work_s and done < ready_s:
            until_s = ready_s if ready_s < work_s else work_s
            now += until_s - done
            done = until_s
            work_end_s = now
        if done < work_s:
            left_s = (work_s - done) / speed
            whole_s = startup_s + size / rate
            if whole_s <= left_s:
                now += whole_s
                done += whole_s * speed
                work_end_s = now
            else:
                done, work_end_s = work_s, now + left_s
                if left_s > startup_s:
                    size -= (left_s - startup_s) * rate
                    startup_s = left_s
                now += startup_s + size / idle_rate
        else:
            now += startup_s + size / idle_rate
        if ended_s is not None:
            ended_s.append(now)
    if done < work_s:
        now += work_s - done
        work_end_s = now
    return now, work_end_s


def multi_lane_beside_work(
    queues: Sequence[Queue],
    figures: LevelFigures,
    work_s: float,
    ended_s: Sequence[list[float]] | None = None,
) -> tuple[float, float]:
    """Return when several lanes and computation have ended, and when computation has.

    Flows slow computation and all have the level of ``figures``. Rates change when a
    start-up, a flow or computation ends; between these, gradients become ready, which
    only begins further start-ups.
    """
    rates, speeds = figures.rates, figures.speeds
    position = [0] * len(queues)
    # Work for which lanes wait, and when start-ups end.
    waiting = sorted((flows[0][0], c) for c, (flows, _) in enumerate(queues))
    starts: list[tuple[float, int]] = []
    # The bytes served, and the counts at which flows end.
    served = 0.0
    ends: list[tuple[float, int]] = []
    sending = active = 0
    rate = 0.0
    now = served_at = done = work_end_s = 0.0
    end_at = _INF  # of the next flow to end
    working, speed = True, 1.0
    while working or starts or ends:
        next_at, event = end_at, _END
        if starts and starts[0][0] < next_at:
            next_at, event = starts[0][0], _START
        if working:
            target = waiting[0][0] if waiting else work_s
            if target > work_s:
                target = work_s
            work_at = now + (target - done) / speed
            if work_at < next_at:
                next_at, event, done = work_at, _WORK, target
            else:
                done += (next_at - now) * speed
        now = next_at
        if event != _WORK or done >= work_s:
            served += (now - served_at) * rate
            served_at = now
            if event == _END:
                served, c = heappop(ends)
                flows, number = queues[c]
                sending -= number
                active -= number
                if ended_s is not None:
                    ended_s[c].append(now)
                position[c] += 1
                if position[c] < len(flows):
                    heappush(waiting, (flows[position[c]][0], c))
            elif event == _START:
                c = heappop(starts)[1]
                flows, number = queues[c]
                heappush(ends, (served + flows[position[c]][2], c))
                sending += number
            else:
                working, work_end_s, rates = False, now, figures.idle_rates
            if sending:
                rate = rates[sending]
                end_at = now + (ends[0][0] - served) / rate
            else:
                served = rate = 0.0  # keeps the count exact over a long step
                end_at = _INF
        while waiting and (not working or waiting[0][0] <= done):
            c = heappop(waiting)[1]
            flows, number = queues[c]
            active += number
            heappush(starts, (now + flows[position[c]][1], c))
        speed = speeds[active]
    return now, work_end_s


def mixed_lanes_beside_work(
    queues: Sequence[Queue],
    network: Network,
    work_s: float,
    ended_s: Sequence[list[float]] | None = None,
) -> tuple[float, float]:
    """Return when several lanes and computation have ended, and when computation has.

    As `multi_lane_beside_work`, with flows of several levels.
    """
    loads, units, speeds = network.loads, network.units, network.speeds
    rates_of = network.rates
    position = [0] * len(queues)
    # Work for which lanes wait, and when start-ups end.
    waiting = sorted((flows[0][0], c) for c, (flows, _) in enumerate(queues))
    starts: list[tuple[float, int]] = []
    # By level: the bytes served, and the counts at which flows end.
    served = [0.0] * len(loads)
    ends: list[list[tuple[float, int]]] = [[] for _ in loads]
    busy: list[int] = []  # levels of which flows send
    sending = load = 0
    rates: tuple[float, ...] = ()
    now = served_at = done = work_end_s = 0.0
    end_at, ending = _INF, 0  # the next flow's end, and its level
    working, speed = True, 1.0
    while working or starts or busy:
        next_at, event = end_at, _END
        if starts and starts[0][0] < next_at:
            next_at, event = starts[0][0], _START
        if working:
            target = waiting[0][0] if waiting else work_s
            if target > work_s:
                target = work_s
            work_at = now + (target - done) / speed
            if work_at < next_at:
                next_at, event, done = work_at, _WORK, target
            else:
                done += (next_at - now) * speed
        now = next_at
        if event != _WORK or done >= work_s:
            elapsed_s = now - served_at
            served_at = now
            for level in busy:
                served[level] += elapsed_s * rates[level]
            if event == _END:
                served[ending], c = heappop(ends[ending])
                flows, number = queues[c]
                sending -= number * units[ending]
                load -= number * loads[ending]
                if ended_s is not None:
                    ended_s[c].append(now)
                if not ends[ending]:
                    busy.remove(ending)
                    served[ending] = 0.0  # keeps the count exact over a long step
                position[c] += 1
                if position[c] < len(flows):
                    heappush(waiting, (flows[position[c]][0], c))
            elif event == _START:
                c = heappop(starts)[1]
                flows, number = queues[c]
                _, _, size, level = flows[position[c]]
                if not ends[level]:
                    busy.append(level)
                heappush(ends[level], (served[level] + size, c))
                sending += number * units[level]
            else:
                working, work_end_s, rates_of = False, now, network.idle_rates
            end_at = _INF
            if busy:
                rates = rates_of[sending]
                for level in busy:
                    at = now + (ends[level][0][0] - served[level]) / rates[level]
                    if at < end_at:
                        end_at, ending = at, level
        while waiting and (not working or waiting[0][0] <= done):
            c = heappop(waiting)[1]
            flows, number = queues[c]
            _, startup_s, _, level = flows[position[c]]
            load += number * loads[level]
            heappush(starts, (now + startup_s, c))
        speed = speeds[load]
    return now, work_end_s
