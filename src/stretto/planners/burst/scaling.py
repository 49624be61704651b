"""Four methods of scaling, compared by the time until the target is reached.

DeepPool section 2: *weak* scaling gives each GPU the same samples, so the batch grows;
*strong* scaling keeps the batch and gives each GPU fewer; *batch-optimal* scaling
takes, for each number of GPUs, the batch that reaches the target soonest; *burst*
scaling does too, with a burst plan's step in place of data parallelism's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.cost.burst import samples_on, widths_of
from stretto.errors import SpecError
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.search import shortest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.cost.burst import BurstNetwork
    from stretto.schema.burst import LayerProfile
    from stretto.schema.efficiency import SampleEfficiency

METHODS = ("weak", "strong", "batch-optimal", "burst")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One scaling method at one number of GPUs."""

    batch: int

    iteration_s: float

    target_s: float
    """Step / batch * samples to the target: seconds if samples are counted."""

    speedup: float
    """Relative to one GPU with the given batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGpus:
    """All scaling methods at one number of GPUs."""

    gpus: int

    methods: dict[str, ScalingPoint | None]
    """``None`` outside the range of the profile or the curve."""

    batches: tuple[int, ...] = ()
    """The batches that were tried."""


def scaling(
    profile: LayerProfile,
    efficiency: SampleEfficiency,
    network_at: Callable[[int], BurstNetwork],
    *,
    batch: int,
    gpus: Iterable[int],
    widths: str = "powers",
) -> tuple[ScaledGpus, ...]:
    """Return the scaling methods over numbers of GPUs.

    Batches tried are the curve's own, and ``batch`` and that of weak scaling times
    powers of two: so each GPU of any number may get as many samples. Times and
    numbers of samples are never extrapolated: a batch counts only if the profile has
    the samples that a GPU gets, and the curve has the batch.

    Args:
        profile: layers and their times.
        efficiency: samples to the target by batch.
        network_at: the network for a number of GPUs.
        batch: on one GPU, and of strong scaling.
        gpus: numbers of GPUs.
        widths: for the burst plans, as for a plan.

    Raises:
        SpecError: one GPU cannot run ``batch``, or the curve does not have it.
    """
    found = _Scaling(profile, efficiency, network_at, batch, widths)
    return tuple(found.at(count) for count in gpus)


@final
class _Scaling:
    def __init__(
        self,
        profile: LayerProfile,
        efficiency: SampleEfficiency,
        network_at: Callable[[int], BurstNetwork],
        batch: int,
        widths: str,
    ) -> None:
        self._profile, self._efficiency = profile, efficiency
        self._network_at, self._batch, self._widths = network_at, batch, widths
        self._min_samples = max(layer.times[0].samples for layer in profile.layers)
        self._max_samples = min(layer.times[-1].samples for layer in profile.layers)
        samples = efficiency.samples_to_target(batch)
        if samples is None:
            low, high = efficiency.points[0].batch, efficiency.points[-1].batch
            raise SpecError(
                f"{efficiency.name!r} covers batches {low} to {high}, but {batch} is "
                "needed: choose a batch within that range, or measure that one too",
                place=".points",
            )
        seconds = sum(layer.compute_s(batch) for layer in profile.layers)
        self._alone_s = samples / batch * seconds

    def at(self, gpus: int) -> ScaledGpus:
        every = self._batches(gpus)
        plain = [self._point(b, self._data_parallel_s(b, gpus)) for b in every]
        burst = [self._point(b, self._burst_s(b, gpus)) for b in every]
        weak = self._batch * gpus
        return ScaledGpus(
            gpus=gpus,
            batches=tuple(
                batch
                for batch, *points in zip(every, plain, burst, strict=True)
                if any(point is not None for point in points)
            ),
            methods={
                "weak": self._point(weak, self._data_parallel_s(weak, gpus)),
                "strong": self._point(
                    self._batch, self._data_parallel_s(self._batch, gpus)
                ),
                "batch-optimal": _soonest(plain),
                "burst": _soonest(burst),
            },
        )

    def _batches(self, gpus: int) -> list[int]:
        found = {point.batch for point in self._efficiency.points}
        largest = gpus * self._max_samples
        for start in (self._batch, self._batch * gpus):
            size = start
            while size >= 1:
                found.add(size)
                size //= 2
            size = start
            while size <= largest:
                found.add(size)
                size *= 2
        return sorted(size for size in found if size <= largest)

    def _point(self, batch: int, iteration_s: float | None) -> ScalingPoint | None:
        samples = self._efficiency.samples_to_target(batch)
        if samples is None or iteration_s is None:
            return None
        target_s = samples / batch * iteration_s
        return ScalingPoint(
            batch=batch,
            iteration_s=iteration_s,
            target_s=target_s,
            speedup=self._alone_s / target_s if target_s > 0 else 1.0,
        )

    def _data_parallel_s(self, batch: int, gpus: int) -> float | None:
        width = min(batch, gpus)
        share = samples_on(batch, width)
        if not self._min_samples <= share <= self._max_samples:
            return None
        network = self._network_at(gpus)
        return sum(
            layer.compute_s(share)
            + network.sync_s(layer.parameter_bytes, width)
            + network.norm_s(layer.norms, width)
            for layer in self._profile.layers
        )

    def _burst_s(self, batch: int, gpus: int) -> float | None:
        shares = {g: samples_on(batch, g) for g in widths_of(self._widths, gpus, batch)}
        widths = [
            g for g, n in shares.items() if self._min_samples <= n <= self._max_samples
        ]
        if not widths:
            return None
        problem = BurstProblem(
            profile=self._profile,
            network=self._network_at(gpus),
            gpus=gpus,
            batch=batch,
            widths=tuple(widths),
        )
        found = shortest(problem)
        return None if found is None else found[0]


def _soonest(points: list[ScalingPoint | None]) -> ScalingPoint | None:
    known = [point for point in points if point is not None]
    return min(known, key=lambda point: (point.target_s, point.batch), default=None)
