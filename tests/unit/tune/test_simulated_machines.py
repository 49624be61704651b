"""Whole searches on simulated machines, quiet and disturbed, over many seeds.

A machine has a clock of its own, a true step time for every plan, and a load that
changes over that time. `train` runs a search on it as a training run would, in
milliseconds.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.schema import Plan
from stretto.tune.search import Search
from stretto.tune.search_space import Point, Space
from stretto.tune.techniques import CoordinateTechnique, PredictedTechnique
from stretto.tune.trial import SearchLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.schema import Cluster, Workload

LOADS = ("quiet", "heavy tails", "busy loops", "drift", "slow rank")
"""Kinds of disturbance."""


class Machine:
    """Steps whose lengths depend on the plan and on what else the machine does."""

    def __init__(self, load: str, *, seed: int, step_s: float = 0.2) -> None:
        self._load = load
        self._rng = random.Random(seed)
        self._step_s = step_s
        self.now_s = 0.0
        self._loops = [False, False]
        self._switch_s = [self._rng.expovariate(1 / self._mean_s) for _ in range(2)]
        self._phase = self._rng.uniform(0, 2 * math.pi)
        self._noise = self._rng.uniform(0.005, 0.015)

    @property
    def _mean_s(self) -> float:
        """Mean time for which a busy loop runs or pauses."""
        return 15 * self._step_s

    @property
    def busy(self) -> int:
        """Busy loops beside the training now."""
        for i, at_s in enumerate(self._switch_s):
            while at_s <= self.now_s:
                self._loops[i] = not self._loops[i]
                at_s += self._rng.expovariate(1 / self._mean_s)
            self._switch_s[i] = at_s
        return sum(self._loops)

    def slowdown(self) -> float:
        """The factor on the step that begins now."""
        gauss = self._rng.gauss
        factor = math.exp(gauss(0, self._noise))
        if self._load == "heavy tails":
            factor = math.exp(gauss(0, 0.04))
            if self._rng.random() < 0.15:
                factor *= 1 + self._rng.paretovariate(1.5)
        elif self._load == "busy loops":
            factor *= (1 + 0.45 * self.busy) * math.exp(gauss(0, 0.05 * self.busy))
        elif self._load == "drift":
            turn = self.now_s / (60 * self._step_s)
            factor *= 1 + 0.4 * math.sin(turn + self._phase)
        elif self._load == "slow rank":
            # The slowest of four ranks counts, and one of them lags at times.
            factor = max(math.exp(gauss(0, 0.03)) for _ in range(4))
            if self._rng.random() < 0.1:
                factor *= 1.3
        return factor

    def step(self, true_s: float, *, change: bool) -> float:
        """Train one step; return its length."""
        step_s = true_s * self.slowdown()
        if change:
            step_s += self._rng.uniform(0.05, 0.3) * self._step_s
        self.now_s += step_s
        return step_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a search went."""

    search: Search

    chosen: Plan

    over_best: float
    """The chosen plan's true step over the shortest there is."""

    saved_of_ddp: float
    """Share of the baseline's step that the best plan saves."""

    kept_ddp: bool

    lost_steps: float
    """Time lost in the first hundred steps against the best plan of all, in steps."""

    steps: int


def train(
    search: Search,
    machine: Machine,
    true_s: Callable[[Plan], float],
    *,
    best_s: float,
    ddp: Plan,
    observe: Callable[[], None] = lambda: None,
) -> Run:
    """Run a search to its end and for a hundred steps at least."""
    steps = 0
    lost_s = 0.0
    before = None
    while (trial := search.next_trial()) is not None:
        over = False
        while not over:
            change = before != trial.plan.digest
            before = trial.plan.digest
            step_s = machine.step(true_s(trial.plan), change=change)
            if steps < 100:
                # The load is not the search's doing: count the plan's own time.
                excess_s = true_s(trial.plan) - best_s
                lost_s += excess_s + (0.15 * best_s if change else 0.0)
            steps += 1
            over = search.step(step_s, counts=not change)
            assert steps < 5000, "the search does not end"
        observe()
    assert search.incumbent is not None
    chosen = search.incumbent.plan
    lost_s += max(0, 100 - steps) * (true_s(chosen) - best_s)
    return Run(
        search=search,
        chosen=chosen,
        over_best=true_s(chosen) / best_s,
        saved_of_ddp=1 - best_s / true_s(ddp),
        kept_ddp=chosen.digest == ddp.digest,
        lost_steps=lost_s / best_s,
        steps=steps,
    )


class Network:
    """A space of plans with true step times and a model that is wrong about them."""

    def __init__(
        self,
        plans: dict[Point, Plan],
        truths: dict[Point, float],
        ddp: Plan,
        ddp_s: float,
        *,
        seed: int,
        error: float = 0.04,
    ) -> None:
        rng = random.Random(seed)
        self.plans = plans
        self.ddp = ddp
        self._true_s = {plans[point].digest: s for point, s in truths.items()}
        self._true_s[ddp.digest] = ddp_s
        self.best_s = min(self._true_s.values())
        self.believed_s = {
            point: s * math.exp(rng.gauss(0, error)) for point, s in truths.items()
        }
        self._ddp_believed_s = ddp_s * math.exp(rng.gauss(0, error))
        self._by_digest = {
            plans[point].digest: s for point, s in self.believed_s.items()
        }
        self._by_digest[ddp.digest] = self._ddp_believed_s

    def true_s(self, plan: Plan) -> float:
        """A plan's step on the quiet machine."""
        return self._true_s[plan.digest]

    def predicted_s(self, plan: Plan) -> float:
        """The same as the model believes."""
        return self._by_digest[plan.digest]

    def search(self, space: Space, *, limits: SearchLimits | None = None) -> Search:
        """The default search: the planner's plan, then the model and its neighbors."""
        first = min(self.believed_s, key=self.believed_s.__getitem__)
        planned = self.plans[first]
        starts = [("planner", planned)]
        if self._ddp_believed_s < 1.1 * self.believed_s[first]:
            starts.insert(0, ("ddp", self.ddp))
        return Search(
            starts=starts,
            arms={
                "predicted": PredictedTechnique(space, self.believed_s.__getitem__),
                "coordinate": CoordinateTechnique(space),
            },
            plan_of=self.plans.__getitem__,
            floor_s=lambda plan: self.predicted_s(plan) / 1.05,
            bound_s=0.85 * self.best_s,
            limits=limits or SearchLimits(steps=100, patience=6),
            baseline=self.ddp,
        )


@dataclass(frozen=True, kw_only=True)
class Truth:
    """A space of plans and what each of them really takes."""

    space: Space

    plans: dict[Point, Plan]

    times_s: dict[Point, float]

    ddp: Plan

    ddp_s: float

    def runs(
        self, load: str, seeds: int, *, ddp_ratio: float = 1.0, first: int = 0
    ) -> list[tuple[Network, Run]]:
        """Return searches under a load, with DDP's step scaled by a ratio."""
        found = []
        for seed in range(first, first + seeds):
            network = Network(
                self.plans, self.times_s, self.ddp, self.ddp_s * ddp_ratio, seed=seed
            )
            run = train(
                network.search(self.space),
                Machine(load, seed=seed, step_s=network.best_s),
                network.true_s,
                best_s=network.best_s,
                ddp=self.ddp,
            )
            found.append((network, run))
        return found


def truth_on(workload: Workload, cluster: Cluster, space: Space) -> Truth:
    plans = {point: space.plan(point, cluster) for point in space.points}
    ddp = planners.get("ddp").plan(workload, cluster)
    times_s = {}
    for point, plan in plans.items():
        assert plan.predicted is not None
        times_s[point] = plan.predicted.iteration_s
    assert ddp.predicted is not None
    return Truth(
        space=space,
        plans=plans,
        times_s=times_s,
        ddp=ddp,
        ddp_s=ddp.predicted.iteration_s,
    )


@pytest.fixture(scope="module")
def capped(workload: Workload, cluster: Cluster, space: Space) -> Truth:
    """DDP's step is three times the best."""
    return truth_on(workload, cluster, space)


@pytest.fixture(scope="module")
def uncapped(workload: Workload, cluster: Cluster, space: Space) -> Truth:
    """One flow fills the link: DDP's step is 1.2 times the best."""
    wire, fit = cluster.inter_host, cluster.allreduce
    assert fit is not None
    return truth_on(
        workload,
        replace(
            cluster,
            inter_host=replace(wire, stream_bytes_per_s=None),
            allreduce=replace(fit, s_per_byte=1.25e-8),
        ),
        space,
    )


def share(found: list[tuple[Network, Run]], max_ratio: float) -> float:
    """Share of searches that chose a plan within a ratio of the best."""
    return statistics.fmean(run.over_best <= max_ratio for _, run in found)


@pytest.mark.parametrize("load", LOADS)
def test_a_search_finds_a_plan_near_the_best_under_any_load(
    capped: Truth, load: str
) -> None:
    found = capped.runs(load, 40)
    # The spaces's second best lie 5.03 % above: a search may stop between them.
    assert share(found, 1.053) >= 0.95
    assert not any(run.kept_ddp for _, run in found)
    assert not any(network.true_s(run.chosen) > capped.ddp_s for network, run in found)


@pytest.mark.parametrize("load", LOADS)
def test_a_gain_of_a_sixth_is_found_under_load(uncapped: Truth, load: str) -> None:
    found = uncapped.runs(load, 40)
    assert share(found, 1.053) >= (0.9 if load == "busy loops" else 0.95)


@pytest.mark.parametrize("load", LOADS)
def test_a_gain_of_a_ninth_is_rarely_missed_under_load(
    uncapped: Truth, load: str
) -> None:
    best_s = min(uncapped.times_s.values())
    found = uncapped.runs(load, 60, ddp_ratio=1.12 * best_s / uncapped.ddp_s)
    assert statistics.fmean(run.kept_ddp for _, run in found) <= 0.06


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ddp_ratio", [0.80, 0.83, 0.84])
def test_no_search_ends_with_a_plan_slower_than_ddp_s_buckets(
    uncapped: Truth, load: str, ddp_ratio: float
) -> None:
    """DDP's buckets are 3 % faster than the best other plan, as fast, or a tie."""
    found = uncapped.runs(load, 30, ddp_ratio=ddp_ratio)
    slower = [
        network.true_s(run.chosen) / network.true_s(uncapped.ddp)
        for network, run in found
    ]
    assert statistics.fmean(ratio > 1.01 for ratio in slower) <= 0.05
    assert statistics.fmean(run.kept_ddp for _, run in found) >= 0.75
    assert share(found, 1.05) >= 0.95


@pytest.mark.parametrize("ddp_ratio", [1.0, 0.9, 0.83])
def test_a_quiet_search_loses_little_of_the_first_hundred_steps(
    capped: Truth, uncapped: Truth, ddp_ratio: float
) -> None:
    for truth in (capped, uncapped):
        lost = []
        for network, run in truth.runs("quiet", 30, ddp_ratio=ddp_ratio):
            # Against a run that knew the plan that was chosen in the end.
            known_steps = 100 * (network.true_s(run.chosen) / network.best_s - 1)
            lost.append(run.lost_steps - known_steps)
        assert statistics.median(lost) <= 2.0
        assert sorted(lost)[int(0.9 * len(lost))] <= 4.0


def test_a_search_ends_in_bounded_time_under_any_load(uncapped: Truth) -> None:
    for load in LOADS:
        steps = [run.steps for _, run in uncapped.runs(load, 20, ddp_ratio=0.85)]
        assert max(steps) <= 3 * 100 + 40 + 2 * 18
