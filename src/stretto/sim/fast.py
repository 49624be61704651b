"""The model of `simulate_step` for searches that also vary algorithms and resources.

`StepModel` supports rings with the default resource, where all flows have one rate.
Here each bucket has its own algorithm, which changes its start-up and its bytes on the
wire, and its own resource, which changes how fast it sends and how much it slows
computation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, final

from stretto.cost import collective_cost, compute_rate, flow_rates
from stretto.errors import SpecError
from stretto.schema._rules import DTYPE_BYTES
from stretto.sim.engine import Flow, Gate, run
from stretto.sim.flows import bottleneck_link, curve_caps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stretto.cost import CollectiveCost
    from stretto.schema import Cluster, Workload

_INF = float("inf")

_Flow = tuple[float, float, float, int]
"""Required work, start-up, bytes on the wire, level of resource."""


@final
class MixedModel:
    """Iteration times of buckets of neighboring tensors, any algorithm and resource.

    Each bucket has its own; gradients are in their own type, under backward or into
    forward. Lanes whose queues are equal stay equal and are taken as one. One queue is
    a chain of closed forms; several are simulated from event to event, with the rates
    of every combination of levels computed once.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        tensors = workload.tensors
        self._cluster = cluster
        self._num_tensors = len(tensors)
        self._silent = cluster.ranks == 1
        self._forward_s = workload.forward_s
        self._needed_s = [tensor.needed_s for tensor in tensors]
        self._work_s = workload.forward_s + workload.backward_s
        self._ready_s = [workload.forward_s + tensor.ready_s for tensor in tensors]
        self._bytes = [0, *accumulate(t.bytes for t in tensors)]
        self._elements = [
            0,
            *accumulate(t.bytes // DTYPE_BYTES[t.dtype] for t in tensors),
        ]
        self._costs: dict[tuple[str, int], CollectiveCost] = {}
        self._rates = flow_rates(cluster)
        contention = cluster.contention
        self._compute = None if contention is None else contention.compute
        levels: tuple[int, ...] = (0,)
        alone = self._rates.alone_bytes_per_s
        self._caps = [(alone, alone)]
        if contention is not None:
            levels = contention.resources
            self._caps = [curve_caps(contention, r, self._rates) for r in levels]
        self._levels = levels
        self._level_of: dict[int | None, int] = {r: i for i, r in enumerate(levels)}
        self._level_of[None] = 0
        self._shares: dict[tuple[bool, tuple[int, ...]], list[float]] = {}
        self._speeds: dict[int, float] = {0: 1.0}

    def iteration_s(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        resources: Sequence[int | None] = (),
        algorithms: Sequence[str] = (),
        overlap: str = "backward",
    ) -> float:
        """Return `simulate_step`'s ``iteration_s``; the first four are `StepModel`'s.

        ``overlap`` is ``backward`` or ``forward``.

        Raises:
            SpecError: the buckets leave out tensors, or the cluster lacks a resource.
        """
        if not ends or ends[-1] != self._num_tensors:
            raise SpecError(
                f"ends must end with the number of tensors ({self._num_tensors}), got "
                f"{list(ends)[-1:]}",
                place=".ends",
            )
        if self._silent:
            return self._work_s
        queues = self._queues(ends, lanes, bucket_lanes, slices, resources, algorithms)
        if not queues:
            return self._work_s
        if overlap == "forward":
            equal = queues[0][1] == lanes and all(parts == lanes for parts in slices)
            if equal and self._compute is None:
                return self._period_in_turn(ends, *queues[0])
            return self._period(
                ends, lanes, bucket_lanes, slices, resources, algorithms
            )
        if len(queues) == 1:
            queue, number = queues[0]
            if self._compute is None:
                return self._in_turn(queue, number)
            return self._in_turn_beside_contention(queue, number)
        return self._at_once(queues)

    def caps(self, resource: int | None) -> tuple[float, float]:
        """Return a lone flow's highest rate with a resource, during work and after."""
        return self._caps[self._level_of[resource]]

    def linear_cost(
        self, num_flows: int, resource: int | None, algorithm: str, *, working: bool
    ) -> tuple[float, float]:
        """Return start-up and seconds per byte of a bucket in equal slices.

        Each slice has its own lane; computation runs all the time or not at all.
        """
        if self._silent:
            return 0.0, 0.0
        cost = self._cost(algorithm, num_flows)
        counts = [0] * len(self._levels)
        counts[self._level_of[resource]] = num_flows
        rate = self._share(tuple(counts), working=working)[self._level_of[resource]]
        s_per_byte = cost.startup_s_per_byte + cost.wire_factor / (num_flows * rate)
        return cost.startup_s, s_per_byte

    def _cost(self, algorithm: str, lanes: int) -> CollectiveCost:
        known = self._costs.get((algorithm, lanes))
        if known is None:
            known = collective_cost(self._cluster, algorithm, lanes=lanes)
            self._costs[algorithm, lanes] = known
        return known

    def _queues(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        resources: Sequence[int | None],
        algorithms: Sequence[str],
    ) -> list[tuple[tuple[_Flow, ...], int]]:
        """Return each lane's flows, equal lanes once with their number."""
        queues: list[list[_Flow]] = [[] for _ in range(lanes)]
        for lane, flows in self._lane_flows(
            ends, lanes, bucket_lanes, slices, resources, algorithms
        ):
            for j, flow in enumerate(flows, start=lane):
                queues[j % lanes].append(flow)
        return [
            (queue, number)
            for queue, number in Counter(map(tuple, queues)).items()
            if queue
        ]

    def _lane_flows(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        resources: Sequence[int | None],
        algorithms: Sequence[str],
    ) -> Iterator[tuple[int, list[_Flow]]]:
        """Return first lane and slices of each bucket that is not empty."""
        elements, sizes, ready_s = self._elements, self._bytes, self._ready_s
        first = 0
        for end, lane, parts, resource, algorithm in zip(
            ends,
            bucket_lanes,
            slices,
            resources or repeat(None),
            algorithms or repeat("ring"),
            strict=False,
        ):
            count = elements[end] - elements[first]
            size = sizes[end] - sizes[first]
            first = end
            if not count:
                continue
            at = ready_s[end - 1]
            cost = self._cost(algorithm, lanes)
            try:
                level = self._level_of[resource]
            except KeyError:
                raise SpecError(
                    f"resource must be one of the cluster's levels "
                    f"({', '.join(map(str, self._levels))}), got {resource}",
                    place=".resources",
                ) from None
            each, extra = divmod(count, parts)
            flows: list[_Flow] = []
            for number, share in ((extra, each + 1), (parts - extra, each)):
                if share and number:
                    part = size * share / count
                    startup_s = cost.startup_s + cost.startup_s_per_byte * part
                    if cost.extra:
                        startup_s += cost.extra_s(part)
                    flow = (at, startup_s, cost.wire_factor * part, level)
                    flows.extend([flow] * number)
            yield lane, flows

    def _speed(self, load: int) -> float:
        speed = self._speeds.get(load)
        if speed is None:
            speed = 1.0
            if self._compute is not None:
                speed = compute_rate(self._compute, load)
            self._speeds[load] = speed
        return speed

    def _share(self, counts: tuple[int, ...], *, working: bool) -> list[float]:
        """Return the rate of a flow of each level with these counts: max-min fair."""
        known = self._shares.get((working, counts))
        if known is not None:
            return known
        rates = self._rates
        total = sum(counts)
        limit = rates.per_flow_bytes_per_s(1)
        if rates.gamma:
            limit = _gamma_limit(rates.limits_bytes_per_s, total)
        caps = [min(limit, cap[0 if working else 1]) for cap in self._caps]
        shares = [0.0] * len(caps)
        left, flows = rates.link_bytes_per_s, total
        for level in sorted(range(len(caps)), key=caps.__getitem__):
            if counts[level]:
                shares[level] = min(caps[level], left / flows)
                left -= shares[level] * counts[level]
                flows -= counts[level]
        self._shares[working, counts] = shares
        return shares

    def _in_turn(self, queue: tuple[_Flow, ...], number: int) -> float:
        rate = self._share((number,), working=True)[0]
        end = 0.0
        for ready_s, startup_s, size, _ in queue:
            end = (ready_s if ready_s > end else end) + startup_s + size / rate
        return end if end > self._work_s else self._work_s

    def _in_turn_beside_contention(
        self, queue: tuple[_Flow, ...], number: int
    ) -> float:
        """Run LIBRA's stages (Eq. 8-11): start-up and bytes, with work beside them."""
        work_s = self._work_s
        tables = {}
        for level in {flow[3] for flow in queue}:
            counts = tuple(
                number if i == level else 0 for i in range(len(self._levels))
            )
            tables[level] = (
                self._share(counts, working=True)[level],
                self._share(counts, working=False)[level],
                self._speed(number * self._levels[level]),
            )
        now = done = 0.0
        for ready_s, startup_s, size, level in queue:
            rate, idle_rate, speed = tables[level]
            if done < work_s:
                if ready_s > done:
                    target = ready_s if ready_s < work_s else work_s
                    now += target - done
                    done = target
                done += startup_s * speed
                if done < work_s:
                    work_left_s = (work_s - done) / speed
                    sending_s = size / rate
                    if sending_s <= work_left_s:
                        now += startup_s + sending_s
                        done += sending_s * speed
                        continue
                    now += work_left_s
                    size -= work_left_s * rate
                done = work_s
            now += startup_s + size / idle_rate
        return now + (work_s - done) if done < work_s else now

    def _period_in_turn(
        self, ends: Sequence[int], queue: tuple[_Flow, ...], number: int
    ) -> float:
        """Simulate overlap ``forward`` of one queue, as `stretto.sim.forward` does.

        Forward waits at each gate for its all-gather, and its delays accumulate.
        """
        rate = self._share((number,), working=True)[0]
        forward_s, backward_s = self._forward_s, self._work_s - self._forward_s
        now = ready_s = 0.0
        for ready_s, startup_s, size, _ in queue:
            begin_s = ready_s - forward_s
            now = (begin_s if begin_s > now else now) + (startup_s + size / rate) / 2
        now = max(now, ready_s - forward_s)
        needed_s = self._bucket_needs(ends)
        late_s = 0.0
        for i in sorted(range(len(queue)), key=lambda i: (needed_s[i], -i)):
            _, startup_s, size, _ = queue[i]
            now += (startup_s + size / rate) / 2
            late_s = max(late_s, now - backward_s - needed_s[i])
        return self._work_s + late_s

    def _bucket_needs(self, ends: Sequence[int]) -> list[float]:
        """Return when forward first needs each bucket that is not empty."""
        needs: list[float] = []
        first = 0
        for end in ends:
            if self._elements[end] > self._elements[first]:
                needs.append(min(self._needed_s[first:end]))
            first = end
        return needs

    def _period(
        self,
        ends: Sequence[int],
        lanes: int,
        bucket_lanes: Sequence[int],
        slices: Sequence[int],
        resources: Sequence[int | None],
        algorithms: Sequence[str],
    ) -> float:
        """Simulate overlap ``forward`` with the event engine."""
        scatters: list[tuple[int, int, Flow]] = []  # need's place, minus bucket, flow
        needed_s = iter(self._bucket_needs(ends))
        backward_s = self._work_s - self._forward_s
        gate_s: list[float] = []
        for lane, bucket in self._lane_flows(
            ends, lanes, bucket_lanes, slices, resources, algorithms
        ):
            for number, (ready_s, startup_s, size, level) in enumerate(bucket):
                scatters.append(
                    (
                        len(gate_s),
                        number,
                        Flow(
                            lane=(lane + number) % lanes,
                            ready_work_s=max(0.0, ready_s - self._forward_s),
                            startup_s=startup_s / 2,
                            wire_bytes=size / 2,
                            cap_bytes_per_s=self._caps[level][0],
                            idle_cap_bytes_per_s=self._caps[level][1],
                            load=self._levels[level],
                        ),
                    )
                )
            gate_s.append(next(needed_s))
        launched_s = max(flow.ready_work_s for _, _, flow in scatters)
        order = sorted(scatters, key=lambda s: (gate_s[s[0]], -s[0], s[1]))
        flows = [flow for _, _, flow in scatters]
        awaited: dict[int, list[int]] = {}
        for index, _, flow in order:
            awaited.setdefault(index, []).append(len(flows))
            flows.append(replace(flow, ready_work_s=launched_s))
        compute = self._compute
        outcome = run(
            flows,
            [bottleneck_link(self._cluster)],
            work_s=self._work_s,
            work_rate=partial(compute_rate, compute) if compute else None,
            gates=[
                Gate(work_s=backward_s + gate_s[index], flows=tuple(numbers))
                for index, numbers in awaited.items()
            ],
        )
        return outcome.work_end_s

    def _at_once(self, queues: list[tuple[tuple[_Flow, ...], int]]) -> float:
        work_s, levels = self._work_s, self._levels
        position = [0] * len(queues)
        # Work for which lanes wait, when start-ups end, which flows send, bytes left.
        waiting = sorted((queue[0][0], c) for c, (queue, _) in enumerate(queues))
        starts: list[tuple[float, int]] = []
        sending: list[list[float]] = []  # bytes left, level, queue
        counts = [0] * len(levels)
        shares: list[float] = []
        now = done = 0.0
        load = 0
        speed = 1.0
        working = True
        while working or starts or sending:
            next_at, event = _INF, 0
            for flow in sending:
                end_at = now + flow[0] / shares[int(flow[1])]
                if end_at < next_at:
                    next_at, event, ending = end_at, 1, flow
            if starts and starts[0][0] < next_at:
                next_at, event = starts[0][0], 2
            if working:
                target = waiting[0][0] if waiting else work_s
                if target > work_s:
                    target = work_s
                work_at = now + (target - done) / speed
                if work_at < next_at:
                    next_at, event = work_at, 3
                    done = target
                else:
                    done += (next_at - now) * speed
            elapsed_s = next_at - now
            for flow in sending:
                flow[0] -= elapsed_s * shares[int(flow[1])]
            now = next_at
            if event == 1:
                sending.remove(ending)
                c = int(ending[2])
                queue, number = queues[c]
                level = int(ending[1])
                counts[level] -= number
                load -= number * levels[level]
                position[c] += 1
                if position[c] < len(queue):
                    heappush(waiting, (queue[position[c]][0], c))
                shares = self._share(tuple(counts), working=working)
            elif event == 2:
                c = heappop(starts)[1]
                queue, number = queues[c]
                _, _, size, level = queue[position[c]]
                sending.append([size, level, c])
                counts[level] += number
                shares = self._share(tuple(counts), working=working)
            elif done >= work_s:
                working = False
                shares = self._share(tuple(counts), working=working)
            while waiting and (not working or waiting[0][0] <= done):
                c = heappop(waiting)[1]
                queue, number = queues[c]
                _, startup_s, _, level = queue[position[c]]
                load += number * levels[level]
                heappush(starts, (now + startup_s, c))
            speed = self._speed(load)
        return now


def _gamma_limit(limits: tuple[float, ...], num_flows: int) -> float:
    """Return each flow's limit by ``gamma``; beyond the list their sum is constant."""
    if num_flows <= len(limits):
        return limits[max(num_flows, 1) - 1]
    return limits[-1] * len(limits) / num_flows
