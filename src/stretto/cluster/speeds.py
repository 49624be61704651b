"""How fast jobs run on numbers of devices: tables from the burst planner, kept on disk.

The methods are those of `planners.burst.scaling`, but every step is simulated on the
same cluster, so that methods with and without a burst plan compare.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, final

from stretto.cluster.views import (
    BATCH_OPTIMAL,
    BURST,
    DATA_PARALLEL,
    WEAK,
    Speed,
    Speeds,
)
from stretto.cluster.wire import data_of, plain_data
from stretto.cost.burst import BurstNetwork
from stretto.errors import Infeasible, SpecError, StrettoError
from stretto.planners.burst.plan import same_width
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.simulated import plan_on, simulate
from stretto.schema import Cluster, CollocatedPair, codec
from stretto.schema.burst import LayerProfile
from stretto.schema.efficiency import SampleEfficiency
from stretto.sim.collocation import collocate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.sim.burst import BurstStep

_VERSION = 2
"""Part of the names of kept tables; changes when their contents would."""

_ROUNDING = 1e-9
"""Relative; more than sums of a step's times differ by their order."""


@final
@dataclass(frozen=True, kw_only=True)
class SpeedQuestion:
    """The inputs of a job's speeds."""

    profile: LayerProfile

    network: Cluster
    """One host of it is as large as needed: full bisection, as in DeepPool's paper."""

    batch: int

    gpus: tuple[int, ...]

    methods: tuple[str, ...]

    efficiency: SampleEfficiency

    amplification_limit: float | None = None

    pair: CollocatedPair | None = None
    """Measurements of a background beside it; ``None``: nothing was measured."""

    @property
    def digest(self) -> str:
        """Digest of everything that the speeds depend on."""
        text = json.dumps(
            [
                _VERSION,
                codec.encode(self.profile).decode(),
                codec.encode(self.network).decode(),
                codec.encode(self.efficiency).decode(),
                self.batch,
                self.gpus,
                self.methods,
                self.amplification_limit,
                None if self.pair is None else dataclasses.asdict(self.pair),
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def speeds(question: SpeedQuestion, *, folder: Path | None = None) -> Speeds:
    """Return a job's speeds; they are kept in a folder of the user's cache.

    Raises:
        SpecError: one device cannot run the batch.
    """
    path = (cache_folder() if folder is None else folder) / f"{question.digest}.json"
    try:
        found: Speeds = data_of(json.loads(path.read_bytes()))["speeds"]
    except (OSError, ValueError, KeyError, AttributeError, StrettoError):
        found = _Table(question).speeds()
        _keep(path, found)
    return found


def cache_folder() -> Path:
    """Return the folder of kept tables."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stretto" / "speeds"


def _keep(path: Path, found: Speeds) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain_data({"speeds": found}))
        codec.write_atomically(path, text.encode())
    except (OSError, StrettoError):
        return  # a table that cannot be kept is computed again


@final
class _Table:
    def __init__(self, question: SpeedQuestion) -> None:
        self._question = question
        layers = question.profile.layers
        self._min = max(layer.times[0].samples for layer in layers)
        self._max = min(layer.times[-1].samples for layer in layers)
        self._step_of = cache(self._data_parallel)
        alone = self._step_of(1, question.batch)
        needed = question.efficiency.samples_to_target(question.batch)
        if alone is None or needed is None:
            raise SpecError(
                f"one device cannot run {question.batch} samples of "
                f"{question.profile.name!r} by its profile and its curve "
                f"{question.efficiency.name!r}: choose another batch",
                place=".batch",
            )
        self._alone_s = needed / question.batch * alone.iteration_s

    def speeds(self) -> Speeds:
        rows: dict[str, tuple[Speed, ...]] = {}
        for method in self._question.methods:
            found = (self._speed(method, gpus) for gpus in sorted(self._question.gpus))
            rows[method] = tuple(row for row in found if row is not None)
        return Speeds(methods=rows)

    def _speed(self, method: str, gpus: int) -> Speed | None:
        batch = self._question.batch
        if method == DATA_PARALLEL:
            return self._row(gpus, batch, self._step_of(gpus, batch))
        if method == WEAK:
            return self._row(gpus, batch * gpus, self._step_of(gpus, batch * gpus))
        if method == BATCH_OPTIMAL:
            return self._batch_optimal(gpus)
        if method == BURST:
            return self._row(gpus, batch, self._burst(gpus))
        raise SpecError(f"unknown method {method!r}", place=".methods")

    def _batch_optimal(self, gpus: int) -> Speed | None:
        """Return the fastest row over `_batches`, the smallest batch of equals."""
        best: Speed | None = None
        # fast: most batches are ruled out by computation alone, without a simulation
        for limit, size in sorted(self._limits(gpus), reverse=True):
            if best is not None and limit < best.speedup:
                break
            row = self._row(gpus, size, self._step_of(gpus, size))
            if row is not None and (
                best is None or (row.speedup, -row.batch) > (best.speedup, -best.batch)
            ):
                best = row
        return best

    def _limits(self, gpus: int) -> Iterator[tuple[float, int]]:
        """Yield a speedup that a batch does not exceed, and the batch.

        A step takes at least as long as its most loaded rank computes.
        """
        question = self._question
        for size in self._batches(gpus):
            needed = question.efficiency.samples_to_target(size)
            share = -(-size // min(gpus, size))
            if needed is None or not self._min <= share <= self._max:
                continue
            min_s = sum(sum(x.time_of(share)) for x in question.profile.layers)
            if min_s > 0:
                limit = self._alone_s / (needed / size * min_s)
                yield limit * (1 + _ROUNDING), size
            else:
                yield math.inf, size

    def _batches(self, gpus: int) -> list[int]:
        found, size = [], self._question.batch
        while size <= gpus * self._max:
            found.append(size)
            size *= 2
        return found

    def _row(self, gpus: int, batch: int, step: BurstStep | None) -> Speed | None:
        needed = self._question.efficiency.samples_to_target(batch)
        if step is None or needed is None:
            return None
        step_s = step.iteration_s
        idle = tuple(
            min(1.0, sum(window.length_s for window in windows) / step_s)
            for windows in step.windows
        )
        pair, loss = self._question.pair, 0.0
        background: tuple[float, ...] = ()
        if pair is not None:
            both = collocate(step, pair)
            background = both.background_by_rank
            loss = 1.0 - step_s / both.iteration_s
        more = gpus - len(idle)
        return Speed(
            gpus=gpus,
            batch=batch,
            step_s=step_s,
            speedup=self._alone_s / (needed / batch * step_s),
            idle_ratios=idle + (1.0,) * more,
            background=background + (1.0,) * more if background else (),
            loss=loss,
        )

    def _problem(self, gpus: int, batch: int) -> tuple[BurstProblem, Cluster]:
        question = self._question
        given = question.network
        network = replace(
            given,
            hosts=1,
            ranks_per_host=gpus,
            # What was fitted between hosts says nothing about one host.
            allreduce=given.allreduce if given.hosts == 1 else None,
        )
        problem = BurstProblem.of(
            question.profile,
            BurstNetwork.of(network, gpus),
            gpus=gpus,
            batch=batch,
            amplification_limit=question.amplification_limit,
        )
        return problem, network

    def _data_parallel(self, gpus: int, batch: int) -> BurstStep | None:
        width = min(gpus, batch)
        if not self._min <= -(-batch // width) <= self._max:
            return None
        try:
            problem, network = self._problem(width, batch)
            problem = replace(problem, widths=(width,), amplification_limit=None)
            return simulate(problem.profile, same_width(problem, width), network)
        except SpecError:  # the batch on one device is beyond the profile
            return None

    def _burst(self, gpus: int) -> BurstStep | None:
        try:
            problem, network = self._problem(gpus, self._question.batch)
            return plan_on(problem, network)[1]
        except (Infeasible, SpecError):
            return None
