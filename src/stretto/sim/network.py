"""A cluster's figures in the form in which the step model's loops read them.

`StepModel` makes a `Network` per cluster. The loops of `stretto.sim.lanes` look up
rates by the flows that send and computation's speed by the load; each combination is
computed once, when a loop first reads it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

from stretto.cost import collective_cost, compute_rate, flow_rates
from stretto.sim.fair import max_min_rates
from stretto.sim.flows import curve_caps, resource_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cost import CollectiveCost, FlowRates
    from stretto.schema import Cluster, ComputeContention

_BITS = 20
_MASK = (1 << _BITS) - 1


@final
class Rates(dict[int, tuple[float, ...]]):
    """Bytes/s of a flow of each level, by how many flows of each level send.

    A key is the sum of `Network.units` over these flows. A combination is computed when
    it is first read; flows of several levels share the link max-min fairly.
    """

    __slots__ = ("_caps", "_rates")

    def __init__(self, rates: FlowRates, caps_bytes_per_s: Sequence[float]) -> None:
        super().__init__()
        self._rates = rates
        self._caps = caps_bytes_per_s

    def __missing__(self, flows: int) -> tuple[float, ...]:
        levels = range(len(self._caps))
        numbers = [flows >> _BITS * level & _MASK for level in levels]
        limit = self._rates.limit_bytes_per_s(sum(numbers))
        self[flows] = found = tuple(
            max_min_rates(
                [min(limit, cap) for cap in self._caps],
                [(0,)] * len(numbers),
                [self._rates.link_bytes_per_s],
                numbers=numbers,
            )
        )
        return found


@final
class LevelFigures:
    """Rates and speeds by the number of flows, all of one level; index 0: no flow."""

    __slots__ = ("idle_rates", "rates", "speeds")

    def __init__(self) -> None:
        self.rates = [0.0]
        """Bytes/s of each flow while computation runs."""
        self.idle_rates = [0.0]
        """Bytes/s of each flow after it."""
        self.speeds = [1.0]
        """Speeds of computation, relative to undisturbed; one without contention."""


@final
class LoadSpeeds(dict[int, float]):
    """Computation's speed by the load of the flows under way."""

    __slots__ = ("_compute",)

    def __init__(self, compute: ComputeContention | None) -> None:
        super().__init__({0: 1.0})
        self._compute = compute

    def __missing__(self, load: int) -> float:
        speed = 1.0 if self._compute is None else compute_rate(self._compute, load)
        self[load] = speed
        return speed


@final
class Network:
    """Rates, start-ups and slow-downs of one cluster.

    Flows differ in level: the index of their resource among the contention's. Without
    contention all flows have level 0, and one rate at any time.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        rates = self._flow_rates = flow_rates(cluster)
        contention = cluster.contention
        self.contended = contention is not None
        self._compute = None if contention is None else contention.compute
        self.loads: tuple[int, ...] = (0,)
        """By level: load that a flow puts on computation."""
        alone = rates.alone_bytes_per_s
        self.caps: tuple[tuple[float, float], ...] = ((alone, alone),)
        """By level: a flow's highest rate while computation runs, and after it."""
        if contention is not None:
            self.loads = contention.resources
            self.caps = tuple(curve_caps(contention, r, rates) for r in self.loads)
        self._figures = [LevelFigures() for _ in self.loads]
        self._costs: dict[tuple[str, int], CollectiveCost] = {}

    # Of flows of several levels. Not computed where flows have one.

    @cached_property
    def units(self) -> tuple[int, ...]:
        """By level: what one flow adds to a key of ``rates``."""
        return tuple(1 << _BITS * level for level in range(len(self.loads)))

    @cached_property
    def rates(self) -> Rates:
        """Rates while computation runs."""
        return Rates(self._flow_rates, [cap for cap, _ in self.caps])

    @cached_property
    def idle_rates(self) -> Rates:
        """Rates after computation has ended."""
        return Rates(self._flow_rates, [cap for _, cap in self.caps])

    @cached_property
    def speeds(self) -> LoadSpeeds:
        """Computation's speed by load."""
        return LoadSpeeds(self._compute)

    # Of flows of one level.

    def at(self, level: int, lanes: int) -> LevelFigures:
        """Return the figures of up to ``lanes`` flows of one level."""
        figures = self._figures[level]
        if len(figures.rates) <= lanes:
            self._extend(figures, level, lanes)
        return figures

    def _extend(self, figures: LevelFigures, level: int, lanes: int) -> None:
        rate_of, compute = self._flow_rates.per_flow_bytes_per_s, self._compute
        (cap, idle_cap), load = self.caps[level], self.loads[level]
        for number in range(len(figures.rates), lanes + 1):
            rate = rate_of(number)
            figures.rates.append(min(rate, cap))
            figures.idle_rates.append(min(rate, idle_cap))
            if compute is not None:
                figures.speeds.append(compute_rate(compute, number * load))

    def cost(self, algorithm: str, lanes: int) -> CollectiveCost:
        """Return the cost of a collective in a plan of ``lanes`` lanes."""
        known = self._costs.get((algorithm, lanes))
        if known is None:
            known = collective_cost(self.cluster, algorithm, lanes=lanes)
            self._costs[algorithm, lanes] = known
        return known

    def level_of(self, resource: int | None) -> int:
        """Return the level of a resource; ``None``: the default.

        Raises:
            SpecError: the contention does not list it.
        """
        contention = self.cluster.contention
        if contention is None:
            return 0
        return self.loads.index(resource_of(resource, contention))
