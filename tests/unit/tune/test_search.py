"""The search on a simulated job: what it finds, what it costs, when it stops."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.tune.search import FINAL, MOST_TRIAL_STEPS, START, Limits, Search, Trial
from stretto.tune.techniques import (
    CoordinateTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
    PredictedTechnique,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.schema import Cluster, Plan
    from stretto.tune.space import Point, Space
    from stretto.tune.techniques import AbstractTechnique

    StepTime = Callable[[Point], float]


class Job:
    """Steps whose times are the simulator's, with noise."""

    def __init__(
        self, space: Space, cluster: Cluster, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.space = space
        self.cluster = cluster
        self._noise = noise
        self._rng = random.Random(seed)
        self._true_s: dict[str, float] = {}

    def plan(self, point: Point) -> Plan:
        plan = self.space.plan(point, self.cluster)
        assert plan.predicted is not None
        self._true_s[plan.digest] = plan.predicted.iteration_s
        return plan

    def true_s(self, plan: Plan) -> float:
        return self._true_s[plan.digest]

    def step_s(self, plan: Plan) -> float:
        return self.true_s(plan) * (1 + abs(self._rng.gauss(0, self._noise)))

    def search(
        self,
        arms: dict[str, AbstractTechnique],
        *,
        start: Point,
        limits: Limits | None = None,
        bound_s: float = 0.0,
    ) -> Search:
        return Search(
            starts=[("first", self.plan(start))],
            arms=arms,
            plan_of=self.plan,
            floor_s=lambda _plan: 0.0,
            bound_s=bound_s,
            limits=limits or Limits(steps=100, lost_ratio=1e9),
        )

    def run(self, search: Search, outliers: Sequence[int] = ()) -> Search:
        number = 0
        while (trial := search.next_trial()) is not None:
            search.step(10.0, counts=False)
            while True:
                number += 1
                step_s = self.step_s(trial.plan) * (10 if number in outliers else 1)
                if search.step(step_s):
                    break
        return search


@pytest.fixture
def job(space: Space, cluster: Cluster) -> Job:
    return Job(space, cluster)


def worst(space: Space, step_s: StepTime) -> Point:
    return max(space.points, key=step_s)


def ensemble(space: Space, seed: int = 0) -> dict[str, AbstractTechnique]:
    rng = random.Random(seed)
    return {
        "grid": GridTechnique(space),
        "population": PopulationTechnique(space, rng),
        "hyperband": HyperbandTechnique(space, rng),
        "coordinate": CoordinateTechnique(space),
    }


def test_a_model_that_is_right_is_settled_within_fifteen_steps(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best_s = min(map(step_s, space.points))
    search = job.run(
        job.search(
            {"predicted": PredictedTechnique(space, step_s)},
            start=worst(space, step_s),
            bound_s=best_s,
        )
    )
    assert search.incumbent is not None
    assert search.incumbent.step_s == best_s
    assert search.steps_used <= 15
    assert search.ended == "the incumbent is as fast as the bound, within the noise"


def test_the_blind_ensemble_comes_near_within_its_budget(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    best_s = min(map(step_s, space.points))
    found = []
    for seed in range(9):
        job = Job(space, cluster, noise=0.02, seed=seed)
        search = job.run(job.search(ensemble(space, seed), start=worst(space, step_s)))
        assert search.incumbent is not None
        assert 80 <= search.steps_used <= 100 + MOST_TRIAL_STEPS
        found.append(job.true_s(search.incumbent.plan) / best_s)
    assert sorted(found)[len(found) // 2] < 1.05


def test_noise_alone_never_replaces_the_incumbent(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    kept = 0
    for seed in range(20):
        job = Job(space, cluster, noise=0.05, seed=seed)
        search = job.run(job.search(ensemble(space, seed), start=best))
        assert search.incumbent is not None
        lost = job.true_s(search.incumbent.plan) / step_s(best) - 1
        assert lost < 0.05
        kept += lost == 0
    assert kept >= 15


def test_an_outlier_of_ten_times_changes_nothing(
    job: Job, space: Space, step_s: StepTime
) -> None:
    arms = {"predicted": PredictedTechnique(space, step_s, most_ratio=1.3)}
    calm = job.run(job.search(arms, start=worst(space, step_s)))
    arms = {"predicted": PredictedTechnique(space, step_s, most_ratio=1.3)}
    shaken = job.run(job.search(arms, start=worst(space, step_s)), outliers=(5, 14))
    assert calm.incumbent is not None
    assert shaken.incumbent is not None
    assert shaken.incumbent.plan.digest == calm.incumbent.plan.digest


def test_trials_lose_no_more_than_the_limit_and_one_trial(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = Limits(steps=100, lost_ratio=0.02)
    search = job.run(job.search(ensemble(space), start=best, limits=limits))
    before = [trial for trial in search.trials if trial.technique != FINAL]
    worst_trial_s = max(trial.lost_s(step_s(best)) for trial in before)
    most_s = 0.02 * 100 * step_s(best)
    assert sum(trial.lost_s(step_s(best)) for trial in before) <= most_s + worst_trial_s
    assert search.ended == "trials have lost as much time as they may"
    # Each trial's change was a step of 10 s; no more than twice the best is its doing.
    assert worst_trial_s >= 2 * step_s(best)
    assert all(trial.uncounted_s == [10.0] for trial in search.trials)


def test_pauses_count_among_what_is_lost(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = Limits(steps=100, lost_ratio=0.05)
    search = job.search(ensemble(space), start=best, limits=limits)
    search.pause(0.05 * 100 * step_s(best))
    job.run(search)
    assert search.ended == "trials have lost as much time as they may"
    assert {trial.technique for trial in search.trials} == {START}


def test_noise_about_the_incumbent_is_no_loss() -> None:
    trial = Trial(technique="grid", key="any", plan=None, wanted_steps=4)  # type: ignore[arg-type]
    trial.steps_s += [0.9, 1.1, 1.0]
    assert trial.lost_s(1.0) == pytest.approx(0.0)
    trial.uncounted_s.append(1.5)
    assert trial.lost_s(1.0) == pytest.approx(0.5)
    trial.steps_s.append(50.0)
    assert trial.lost_s(1.0) == pytest.approx(2.5)


def test_a_search_that_can_win_little_costs_little(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.search(ensemble(space), start=best, bound_s=0.999 * step_s(best))
    job.run(search)
    could_win_s = 100 * 0.001 * step_s(best)
    assert search.most_lost_s == pytest.approx(could_win_s)
    assert len(search.trials) <= 3


def test_hopeless_trials_end_early_and_never_win(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.run(job.search(ensemble(space), start=best))
    early = [trial for trial in search.trials if trial.ended_early]
    assert early
    for trial in early:
        assert len(trial.steps_s) == 2
        assert not trial.won
        assert trial.step_s > 1.15 * step_s(best)


def test_a_plan_whose_floor_is_above_the_incumbent_is_never_tried(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = Search(
        starts=[("first", job.plan(best))],
        arms=ensemble(space),
        plan_of=job.plan,
        floor_s=job.true_s,
        bound_s=0.0,
        limits=Limits(),
    )
    job.run(search)
    assert [trial.key for trial in search.trials] == ["first"]
    assert search.ended == "every technique is out of proposals"


def test_a_plan_that_can_not_run_is_marked_and_the_incumbent_stays(
    job: Job, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    search = job.search(
        {"predicted": PredictedTechnique(space, step_s)}, start=order[-1]
    )
    failed: list[Trial] = []
    while (trial := search.next_trial()) is not None:
        if trial.key == order[0]:
            search.fail("out of memory")
            failed.append(trial)
            continue
        while not search.step(job.step_s(trial.plan)):
            pass
    assert [trial.failed for trial in failed] == ["out of memory"]
    assert search.incumbent is not None
    assert search.incumbent.step_s == min(step_s(point) for point in order[1:])


def test_the_same_plan_is_not_measured_twice(
    job: Job, space: Space, step_s: StepTime
) -> None:
    search = job.run(job.search(ensemble(space), start=worst(space, step_s)))
    measured: dict[str, int] = {}
    for trial in search.trials:
        if trial.technique == FINAL:
            continue
        steps = measured.get(trial.plan.digest, 0)
        assert trial.wanted_steps > steps  # only for more steps, as Hyperband asks
        measured[trial.plan.digest] = trial.wanted_steps


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(SpecError, match="steps must be >= 1, got 0"):
        Limits(steps=0)
    with pytest.raises(SpecError, match="lost_ratio must be >= 0, got nan"):
        Limits(lost_ratio=math.nan)


def test_plans_that_noise_left_apart_are_compared_in_turns(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    """A slow spell of the machine under one trial must not decide."""
    order = sorted(space.points, key=step_s)
    job = Job(space, cluster, noise=0.01)
    starts = [("slow", job.plan(order[-1])), ("best", job.plan(order[0]))]
    near = next(p for p in order if 1.02 < step_s(p) / step_s(order[0]) < 1.08)
    starts.append(("near", job.plan(near)))
    search = Search(
        starts=starts,
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=0.0,
        limits=Limits(lost_ratio=1e9),
    )
    turns = []
    while (trial := search.next_trial()) is not None:
        if trial.technique == FINAL:
            turns.append(trial.key)
        spell = 1.09 if trial.key == "best" and trial.technique != FINAL else 1.0
        while not search.step(spell * job.step_s(trial.plan)):
            pass
    assert search.trials[2].won  # the spell made the near one look better
    assert turns[:4] == ["near", "best", "best", "near"][: len(turns[:4])]
    assert search.incumbent is not None
    assert search.incumbent.key == "best"
    assert search.step_s_of(search.incumbent.plan.digest) == search.incumbent.step_s


def test_one_plan_alone_needs_no_last_comparison(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.run(job.search({}, start=best))
    assert [trial.technique for trial in search.trials] == ["start"]


def test_short_steps_are_tried_for_longer(job: Job, space: Space) -> None:
    search = job.search({}, start=space.points[0])
    assert search.next_trial() is not None
    assert [search.step(0.05) for _ in range(5)] == [False] * 4 + [True]


def test_what_was_there_before_is_tried_whatever_the_bound_says(
    job: Job, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    search = Search(
        starts=[("a", job.plan(order[-1])), ("b", job.plan(order[0]))],
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=2 * step_s(order[-1]),
        limits=Limits(),
    )
    job.run(search)
    assert search.incumbent is not None
    assert search.incumbent.key == "b"


def test_patience_ends_a_search_that_brings_nothing(
    job: Job, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = Limits(lost_ratio=1e9, patience=5)
    search = job.run(job.search(ensemble(space), start=best, limits=limits))
    tried = [trial for trial in search.trials if trial.technique not in (START, FINAL)]
    assert len(tried) == 5
    assert search.ended == "5 trials in a row were no better"
    with pytest.raises(SpecError, match="patience must be >= 1, got 0"):
        Limits(patience=0)
