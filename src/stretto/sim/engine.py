"""A fluid event engine: flows on lanes and links, beside one track of work.

It does not depend on training. Between two events every rate is constant. Events are:
work reaches a point where flows become ready or where it must wait for some, work ends,
a flow's start-up ends, a flow's last byte is sent. Simultaneous flows are processed in
the order of their index, so equal inputs give equal runs.

This is the reference for everything faster. Called by `stretto.sim.step` and
`stretto.sim.forward`, for flows that `stretto.sim.flows` makes, and by tests.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import SpecError
from stretto.sim.fair import max_min_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INF = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """A link that flows share max-min fairly."""

    capacity_bytes_per_s: float

    limits_bytes_per_s: tuple[float, ...] = ()
    """``limits_bytes_per_s[k-1]``: upper limit of each of ``k`` flows. Beyond the list
    their sum stays constant; empty: no such limit."""

    def __post_init__(self) -> None:
        for value in (self.capacity_bytes_per_s, *self.limits_bytes_per_s):
            if not 0 < value < _INF:
                raise SpecError(f"a link's rates must be finite and > 0, got {value}")

    def flow_limit_bytes_per_s(self, num_flows: int) -> float:
        """Return the limit of each of ``num_flows`` flows, before sharing."""
        limits = self.limits_bytes_per_s
        if not limits:
            return self.capacity_bytes_per_s
        if num_flows <= len(limits):
            return limits[num_flows - 1]
        return limits[-1] * len(limits) / num_flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes to send over some links, after a start-up in which nothing is sent."""

    lane: int
    """Flows of one lane run one after another, in the order of their index."""

    ready_work_s: float
    """Work that must be done before the flow may start."""

    startup_s: float

    wire_bytes: float

    cap_bytes_per_s: float
    """Highest rate of this flow while work runs."""

    idle_cap_bytes_per_s: float
    """Highest rate of this flow once work has ended."""

    load: float = 0.0
    """Load that the flow puts on the work while it runs, start-up included."""

    links: tuple[int, ...] = (0,)
    """Indices of the links that it crosses."""

    def __post_init__(self) -> None:
        for name in ("ready_work_s", "startup_s", "wire_bytes", "load"):
            if not 0 <= getattr(self, name) < _INF:
                raise SpecError(
                    f"{name} must be finite and >= 0, got {getattr(self, name)}",
                    place=f".{name}",
                )
        for name in ("cap_bytes_per_s", "idle_cap_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise SpecError(
                    f"{name} must be > 0, got {getattr(self, name)}", place=f".{name}"
                )
        if not self.links:
            raise SpecError("a flow crosses at least one link", place=".links")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGate:
    """A point that work passes only after some flows have ended."""

    work_s: float

    flows: tuple[int, ...] = ()
    """Indices of the flows; if empty, the gate only records when work passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times of all events; tuples are by index of the flow."""

    work_end_s: float

    ready_s: tuple[float, ...]
    """When the work that a flow waits for was done."""

    start_s: tuple[float, ...]
    """When its start-up began: it was ready and its lane free."""

    end_s: tuple[float, ...]
    """When its last byte was sent."""

    reached_s: tuple[float, ...] = ()
    """When work reached each gate."""

    passed_s: tuple[float, ...] = ()
    """When work continued from there."""

    @property
    def makespan_s(self) -> float:
        """When the last event happened."""
        return max((self.work_end_s, *self.end_s))


def run(
    flows: Sequence[Flow],
    links: Sequence[SharedLink],
    *,
    work_s: float,
    work_rate: Callable[[float], float] | None = None,
    gates: Sequence[FlowGate] = (),
) -> Outcome:
    """Simulate ``work_s`` of work that starts at time 0 beside the flows.

    Work proceeds at rate 1, and while flows run at ``work_rate(load)`` with the sum of
    their loads; ``None``: always 1. A flow whose ``ready_work_s`` exceeds ``work_s`` is
    ready when work ends. Work that waits at a gate does not run: flows are as fast then
    as after its end.

    Raises:
        SpecError: work waits for a flow that waits for work beyond the gate.

    There are three events per flow, each linear in the number of flows that run at
    once.
    """
    return _Run(flows, links, work_s, work_rate, gates).outcome()


class _Run:
    """The state of one run; call `outcome` to execute it."""

    def __init__(
        self,
        flows: Sequence[Flow],
        links: Sequence[SharedLink],
        work_s: float,
        work_rate: Callable[[float], float] | None,
        gates: Sequence[FlowGate],
    ) -> None:
        self.flows = flows
        self.links = links
        self.work_s = work_s
        self.work_rate = work_rate
        count = len(flows)
        self.now = 0.0
        self.ready_s = [_INF] * count
        self.start_s = [_INF] * count
        self.end_s = [_INF] * count

        # Work: `done` was reached at `done_at` and grows at `speed` since.
        self.working = True
        self.work_end_s = 0.0
        self.done = self.done_at = 0.0
        self.speed = 1.0
        self.load = 0.0
        self.waiting = False  # at a gate
        self.by_ready = sorted(range(count), key=lambda i: (flows[i].ready_work_s, i))
        self.released = 0

        # Gates in the order of their work; how many flows each still waits for.
        self.gates = gates
        self.by_work = sorted(range(len(gates)), key=lambda g: (gates[g].work_s, g))
        self.passed = 0
        self.awaited = [len(set(gate.flows)) for gate in gates]
        self.opens: list[list[int]] = [[] for _ in flows] if gates else []
        for g, gate in enumerate(gates):
            for i in set(gate.flows):
                self.opens[i].append(g)
        self.reached_s = [_INF] * len(gates)
        self.passed_s = [_INF] * len(gates)

        # Lanes: each flow's successor on its lane, and whether a flow is its lane's
        # head.
        self.follower = [-1] * count
        self.is_next = [False] * count
        last: dict[int, int] = {}
        for i, flow in enumerate(flows):
            if flow.lane in last:
                self.follower[last[flow.lane]] = i
            else:
                self.is_next[i] = True
            last[flow.lane] = i

        # Flows under way: `left_bytes` held at `served_at`, falls at `rate` since.
        self.starting: list[tuple[float, int]] = []
        self.sending: list[int] = []
        self.num_active = 0
        self.served_at = 0.0
        self.left_bytes = [flow.wire_bytes for flow in flows]
        self.rate = [0.0] * count
        self.finish_at = _INF
        self.finishing: list[int] = []

        # fast: equal flows need no filling, only a rate per number of flows; a plan's
        # flows are equal as long as its buckets have one resource.
        kinds = {(f.cap_bytes_per_s, f.idle_cap_bytes_per_s, f.links) for f in flows}
        self.flows_are_equal = len(links) == 1 and len(kinds) == 1
        self.equal_rates: dict[tuple[bool, int], float] = {}

    def outcome(self) -> Outcome:
        while True:
            if self.by_work:
                self._pass_gates()
            self._release()
            work_at = self._next_work_event()
            start_at = self.starting[0][0] if self.starting else _INF
            self.now = min(self.finish_at, start_at, work_at)
            if self.now == _INF:
                break
            if self.finish_at <= self.now:
                self._finish()
            elif start_at <= self.now:
                self._serve()
                while self.starting and self.starting[0][0] <= self.now:
                    insort(self.sending, heapq.heappop(self.starting)[1])
                self._share()
            else:
                self.done, self.done_at = self._target(), self.now
                if self.by_work:
                    self._pass_gates()
                if self.done >= self.work_s and not self.waiting:
                    self.working = False
                    self.work_end_s = self.now
                    self._serve()
                    self._share()
        if self.waiting:
            raise SpecError(
                f"work waits at {self.done:g} s for a flow that waits for later work"
            )
        return Outcome(
            work_end_s=self.work_end_s,
            ready_s=tuple(self.ready_s),
            start_s=tuple(self.start_s),
            end_s=tuple(self.end_s),
            reached_s=tuple(self.reached_s),
            passed_s=tuple(self.passed_s),
        )

    def _pass_gates(self) -> None:
        """Pass the gates at the work that is done, or stop at one."""
        waiting = False
        while self.passed < len(self.by_work):
            g = self.by_work[self.passed]
            if self.working and self.gates[g].work_s > self.done:
                break
            self.reached_s[g] = min(self.reached_s[g], self.now)
            if self.awaited[g]:
                waiting = True
                break
            self.passed_s[g] = self.now
            self.passed += 1
        if waiting != self.waiting:
            self.waiting = waiting
            self.done_at = self.now
            self._serve()
            self._share()

    def _release(self) -> None:
        """Start the flows that have become ready on a free lane."""
        by_ready = self.by_ready
        while self.released < len(by_ready):
            i = by_ready[self.released]
            if self.working and self.flows[i].ready_work_s > self.done:
                return
            self.released += 1
            self.ready_s[i] = self.now
            if self.is_next[i]:
                self._start(i)

    def _target(self) -> float:
        """Return the work at which the next event happens."""
        target = self.work_s
        if self.released < len(self.by_ready):
            target = min(target, self.flows[self.by_ready[self.released]].ready_work_s)
        if self.passed < len(self.by_work):
            target = min(target, self.gates[self.by_work[self.passed]].work_s)
        return target

    def _next_work_event(self) -> float:
        if not self.working or self.waiting:
            return _INF
        speed = 1.0
        if self.work_rate is not None and self.num_active:
            speed = self.work_rate(self.load)
        if speed != self.speed:
            self.done += (self.now - self.done_at) * self.speed
            self.done_at, self.speed = self.now, speed
        return max(self.now, self.done_at + (self._target() - self.done) / speed)

    def _start(self, i: int) -> None:
        flow = self.flows[i]
        self.start_s[i] = self.now
        self.load += flow.load
        self.num_active += 1
        heapq.heappush(self.starting, (self.now + flow.startup_s, i))

    def _finish(self) -> None:
        """End the flows whose last byte is sent and start the next on their lanes."""
        self._serve()
        for i in self.finishing:
            self.sending.remove(i)
            self.end_s[i] = self.now
            self.load -= self.flows[i].load
            self.num_active -= 1
            if self.opens:
                for g in self.opens[i]:
                    self.awaited[g] -= 1
            after = self.follower[i]
            if after >= 0:
                self.is_next[after] = True
                if self.ready_s[after] < _INF:
                    self._start(after)
        self._share()

    def _serve(self) -> None:
        """Subtract the bytes sent at the current rates from those left."""
        elapsed_s = self.now - self.served_at
        for i in self.sending:
            self.left_bytes[i] = max(0.0, self.left_bytes[i] - self.rate[i] * elapsed_s)
        self.served_at = self.now

    def _share(self) -> None:
        """Share the links again and find which flow ends next."""
        self.finish_at, self.finishing = _INF, []
        if not self.sending:
            return
        first_s = _INF
        for i, rate in zip(self.sending, self._rates(), strict=True):
            self.rate[i] = rate
            last_s = self.left_bytes[i] / rate
            if last_s < first_s:
                first_s, self.finishing = last_s, [i]
            elif last_s == first_s:
                self.finishing.append(i)
        self.finish_at = self.now + first_s

    def _rates(self) -> list[float]:
        """Return rates of the flows that send, in their order."""
        count = len(self.sending)
        running = self.working and not self.waiting
        if not self.flows_are_equal:
            return self._filled(running=running)
        key = (running, count)
        if key not in self.equal_rates:
            flow, link = self.flows[0], self.links[0]
            self.equal_rates[key] = min(
                flow.cap_bytes_per_s if running else flow.idle_cap_bytes_per_s,
                link.flow_limit_bytes_per_s(count),
                link.capacity_bytes_per_s / count,
            )
        return [self.equal_rates[key]] * count

    def _filled(self, *, running: bool) -> list[float]:
        flows = [self.flows[i] for i in self.sending]
        count = [0] * len(self.links)
        for flow in flows:
            for link in flow.links:
                count[link] += 1
        limits = [
            link.flow_limit_bytes_per_s(num) if num else _INF
            for link, num in zip(self.links, count, strict=True)
        ]
        caps = [
            min(
                flow.cap_bytes_per_s if running else flow.idle_cap_bytes_per_s,
                *(limits[link] for link in flow.links),
            )
            for flow in flows
        ]
        return max_min_rates(
            caps,
            [flow.links for flow in flows],
            [link.capacity_bytes_per_s for link in self.links],
        )
