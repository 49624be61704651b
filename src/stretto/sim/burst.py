"""One step of a burst plan on its ranks, event by event.

This simulates the executor's operations. Each rank runs the layers in order, forward
and backward. Samples are sent as soon as a layer has them and awaited where they are
used. Gradients are summed over a layer's ranks during backward, in buckets. At the end
each rank waits for its buckets and updates its parameters.

Samples in transit and gradients share the hosts' links max-min fairly. Not modeled:
what packets lose to one another. Calls and copies count if the profile has their costs.

It has events of its own: `stretto.sim.engine` has one track of work, and here every
rank computes, waits and slows the others. Called by
`stretto.planners.burst.simulated` and `stretto.planners.burst.collocated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from stretto.background.windows import windows_by_rank
from stretto.cost.burst import ring_of
from stretto.cost.contention import compute_rate
from stretto.errors import SpecError
from stretto.schema.timeline import Span, Timeline
from stretto.sim._burst_script import (
    ALL,
    Await,
    Begin,
    Finish,
    Op,
    RankComputation,
    Script,
)
from stretto.sim.fair import max_min_rates

if TYPE_CHECKING:
    from stretto.background.windows import Window
    from stretto.schema import Cluster
    from stretto.schema.burst import BurstPlan, LayerProfile
    from stretto.schema.burst_host import HostCosts
    from stretto.sim._burst_script import SampleLayouts

BUCKET_BYTES = 4 * 2**20

_NONE = 1e-12
"""Seconds or bytes left over by rounding."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BurstStep:
    """Times of one step of a burst plan."""

    iteration_s: float

    computing_s: tuple[float, ...]
    """By rank: layers, updates, and calls and copies if they are profiled."""

    idle_s: tuple[float, ...]
    """By rank: the rest of the step, in which it waits with nothing to compute."""

    timeline: Timeline
    """Tracks ``rank0``, ... for computation and ``rank0 network``, ... for sending."""

    @property
    def windows(self) -> tuple[tuple[Window, ...], ...]:
        """By rank: begin, length and kind of each idle window; they sum to `idle_s`."""
        return windows_by_rank(self.timeline, range(len(self.idle_s)))


def simulate_burst(
    profile: LayerProfile,
    plan: BurstPlan,
    cluster: Cluster,
    layouts: SampleLayouts,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    lanes: int = 1,
    cores: float | None = None,
) -> BurstStep:
    """Return the step time of a plan whose layers are placed on given ranks.

    Args:
        profile: layers and their times.
        plan: must have been made for the profile.
        cluster: gives the hosts' links; has at least as many ranks as the plan.
        layouts: where samples are placed.
        bucket_bytes: number of bytes of gradients that are summed at once.
        lanes: buckets of the same ranks that may be under way at once.
        cores: processors that all ranks together have, if they are an emulated cluster
            on one machine; ``None`` if each has its own. Slow-downs in the profile take
            precedence.

    Raises:
        PlanMismatch: the plan is for another profile.
        SpecError: the cluster has fewer ranks than the plan, or a time is not profiled.
    """
    plan.check_matches(profile)
    if cluster.ranks < plan.gpus:
        raise SpecError(
            f"the plan needs {plan.gpus} ranks, but {cluster.name!r} has "
            f"{cluster.ranks}: re-plan for {cluster.ranks}",
        )
    script = Script(profile, plan, layouts, bucket_bytes)
    return _Run(script, cluster, plan.gpus, lanes, cores, profile.host).result(plan)


@dataclass(slots=True)
class _Flow:
    """Bytes under way."""

    name: str
    ranks: tuple[int, ...]
    links: tuple[int, ...]
    cap: float
    startup_s: float
    left_bytes: float
    begin_s: float
    messages: int
    """Messages sent and received in start-up."""
    ends: int
    """Ranks that send or receive at a time."""
    startup_rate: float = 0.0
    """Messages per second in start-up."""
    lane: tuple[int, ...] = ()
    move: int = -1
    bucket: int = -1

    def __post_init__(self) -> None:
        if self.startup_s > _NONE:
            self.startup_rate = self.messages / self.startup_s


@dataclass(slots=True)
class _Rank:
    ops: Iterator[Op]
    now: Op | None = None
    left_s: float = 0.0
    begin_s: float = 0.0
    computing_s: float = 0.0
    begun: set[int] = field(default_factory=set)
    summed: list[int] = field(default_factory=list)
    done: bool = False


@final
class _Run:
    """The events of one step."""

    def __init__(
        self,
        script: Script,
        cluster: Cluster,
        ranks: int,
        lanes: int,
        cores: float | None,
        host: HostCosts | None,
    ) -> None:
        self._script, self._cluster = script, cluster
        self._lanes, self._cores, self._host = lanes, cores, host
        self._ranks = [_Rank(iter(ops)) for ops in script.ops]
        hosts = -(-ranks // cluster.ranks_per_host)
        # By host: its outgoing link, then its incoming link.
        self._rates = [cluster.inter_host.bandwidth_bytes_per_s] * (2 * hosts)
        self._time_s = 0.0
        self._flows: list[_Flow] = []
        self._queue: list[_Flow] = []
        self._offered: dict[int, set[int]] = {}
        self._awaited = [len(move.pairs) for move in script.moves]
        self._coming: list[dict[int, int]] = []
        for move in script.moves:
            into: dict[int, int] = {}
            for _, to in move.pairs:
                into[to] = into.get(to, 0) + 1
            self._coming.append(into)
        self._started: set[tuple[int, int, int]] = set()
        self._handed: dict[int, set[int]] = {}
        self._finished: set[int] = set()
        self._spans: list[Span] = []

    def result(self, plan: BurstPlan) -> BurstStep:
        for rank in range(len(self._ranks)):
            self._proceed(rank)
        while not all(rank.done for rank in self._ranks):
            self._advance()
        end_s = self._time_s
        computing = tuple(rank.computing_s for rank in self._ranks)
        return BurstStep(
            iteration_s=end_s,
            computing_s=computing,
            idle_s=tuple(end_s - busy_s for busy_s in computing),
            timeline=Timeline(
                name=f"burst plan on {plan.gpus} ranks, predicted",
                spans=tuple(self._spans),
            ),
        )

    # ranks

    def _proceed(self, number: int) -> None:
        """Run a rank until it computes or waits."""
        rank = self._ranks[number]
        while not rank.done:
            if rank.now is None:
                rank.now = next(rank.ops, None)
                rank.begin_s = self._time_s
                if isinstance(rank.now, RankComputation):
                    rank.left_s = rank.now.duration_s
            op = rank.now
            if op is None:
                rank.done = True
            elif isinstance(op, RankComputation):
                if rank.left_s > _NONE:
                    return
                self._computed(number, rank, op)
            elif isinstance(op, Begin):
                self._offer(op.move, number)
            elif isinstance(op, Finish):
                if self._coming[op.move].get(number, 0):
                    return
            elif isinstance(op, Await):
                if op.bucket not in self._finished:
                    return
            elif op.bucket != ALL:
                rank.summed.append(op.bucket)
                self._hand_over(op.bucket, number)
            elif not self._finished.issuperset(rank.summed):
                return
            rank.now = None

    def _computed(self, number: int, rank: _Rank, op: RankComputation) -> None:
        rank.computing_s += self._time_s - rank.begin_s
        self._spans.append(
            Span(
                track=f"rank{number}",
                name=op.name,
                start_s=rank.begin_s,
                end_s=self._time_s,
                args={"kind": op.kind},
            )
        )

    # what is under way

    def _offer(self, move: int, number: int) -> None:
        """Send between ranks that have both begun the move."""
        here = self._offered.setdefault(move, set())
        here.add(number)
        for (source, target), size in self._script.moves[move].pairs.items():
            key = (move, source, target)
            if key in self._started or not {source, target} <= here:
                continue
            self._started.add(key)
            self._flows.append(self._sent(move, source, target, size))

    def _sent(self, move: int, source: int, target: int, size: float) -> _Flow:
        ring = ring_of(self._cluster)
        per_host = self._cluster.ranks_per_host
        one, two = source // per_host, target // per_host
        near = one == two
        link = self._cluster.intra_host if near else self._cluster.inter_host
        return _Flow(
            name=self._script.moves[move].name,
            ranks=(source, target),
            links=() if near else (2 * one, 2 * two + 1),
            cap=link.flow_bytes_per_s,
            startup_s=link.latency_s if near else ring.step_s,
            left_bytes=size,
            begin_s=self._time_s,
            messages=2,
            ends=2,
            move=move,
        )

    def _hand_over(self, bucket: int, number: int) -> None:
        handed = self._handed.setdefault(bucket, set())
        handed.add(number)
        made = self._script.buckets[bucket]
        if len(handed) < len(made.ranks):
            return
        ring = ring_of(self._cluster)
        per_host = self._cluster.ranks_per_host
        hosts = sorted({rank // per_host for rank in made.ranks})
        near = len(hosts) == 1
        link = self._cluster.intra_host
        count = len(made.ranks)
        # A flow with a negligible number of bytes has its own connection.
        number = bucket % self._lanes if made.size_bytes else -1
        startup_s = made.steps * (link.latency_s if near else ring.step_s)
        lane = (*made.ranks[:1], count, number)
        self._queue.append(
            _Flow(
                name=made.name,
                ranks=made.ranks,
                links=()
                if near
                else tuple(k for host in hosts for k in (2 * host, 2 * host + 1)),
                cap=link.flow_bytes_per_s if near else ring.wire_bytes_per_s,
                startup_s=startup_s if made.startup_s is None else made.startup_s,
                left_bytes=2 * (count - 1) / count * made.size_bytes,
                begin_s=self._time_s,
                messages=made.messages,
                ends=2 * count,
                lane=lane,
                bucket=bucket,
            )
        )
        self._start_queued()

    def _start_queued(self) -> None:
        busy = {flow.lane for flow in self._flows if flow.lane}
        for flow in list(self._queue):
            if flow.lane not in busy:
                busy.add(flow.lane)
                self._queue.remove(flow)
                flow.begin_s = self._time_s
                self._flows.append(flow)

    # time

    def _advance(self) -> None:
        """Advance to the next event."""
        sending = [flow for flow in self._flows if flow.startup_s <= _NONE]
        rates = max_min_rates(
            [flow.cap for flow in sending],
            [flow.links for flow in sending],
            self._rates,
        )
        paces = self._paces(self._connection_load(sending, rates))
        steps = [flow.startup_s for flow in self._flows if flow.startup_s > _NONE]
        steps += [f.left_bytes / rate for f, rate in zip(sending, rates, strict=True)]
        steps += [self._ranks[n].left_s / pace for n, pace in paces.items()]
        if not steps:
            raise AssertionError("every rank of the simulated step waits for another")
        step_s = min(steps)
        self._time_s += step_s
        for flow in self._flows:
            flow.startup_s = max(0.0, flow.startup_s - step_s)
        for flow, rate in zip(sending, rates, strict=True):
            flow.left_bytes -= rate * step_s
        for n, pace in paces.items():
            self._ranks[n].left_s -= pace * step_s
        ended = [
            flow
            for flow, rate in zip(sending, rates, strict=True)
            if flow.left_bytes <= rate * _NONE
        ]
        for flow in ended:
            self._arrived(flow)
        if ended:
            self._start_queued()
        for n in range(len(self._ranks)):
            self._proceed(n)

    def _connection_load(self, sending: list[_Flow], rates: Sequence[float]) -> float:
        """Return the processors that the connections' own threads use now."""
        host = self._host
        if host is None:
            return 0.0
        used = sum(
            flow.ends * rate * host.connection_s_per_byte
            for flow, rate in zip(sending, rates, strict=True)
        )
        return used + sum(
            min(flow.ends, flow.startup_rate * host.connection_s)
            for flow in self._flows
            if flow.startup_s > _NONE
        )

    def _paces(self, connections: float) -> dict[int, float]:
        """Return how fast each computing rank works, relative to undisturbed.

        Background communication counts like ranks that compute, by its share of a
        processor.
        """
        working = [
            n for n, r in enumerate(self._ranks) if isinstance(r.now, RankComputation)
        ]
        share = 1.0
        if self._host is not None and self._host.slowdowns:
            share = 1.0 / self._host.slowdown(len(working) + connections)
        elif self._cores is not None and working:
            share = min(1.0, self._cores / (len(working) + connections))
        contention = self._cluster.contention
        if contention is None:
            return dict.fromkeys(working, share)
        # A move counts once on a rank, whatever the number of its peers.
        busy: list[set[tuple[int, int]]] = [set() for _ in self._ranks]
        for flow in self._flows:
            for rank in flow.ranks:
                busy[rank].add((flow.move, flow.bucket))
        each = contention.resources[0]
        return {
            n: share * compute_rate(contention.compute, each * len(busy[n]))
            for n in working
        }

    def _arrived(self, flow: _Flow) -> None:
        self._flows.remove(flow)
        if flow.bucket >= 0:
            self._finished.add(flow.bucket)
            shown = flow.ranks
        else:
            self._coming[flow.move][flow.ranks[1]] -= 1
            shown = flow.ranks[1:]
        for rank in shown:
            self._spans.append(
                Span(
                    track=f"rank{rank} network",
                    name=flow.name,
                    start_s=flow.begin_s,
                    end_s=self._time_s,
                    args={"kind": "send"},
                )
            )
