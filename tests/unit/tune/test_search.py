"""The search on a simulated job: what it finds, what it costs, when it stops."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.tune.search import CONTROL, FINAL, START, Search
from stretto.tune.techniques import (
    CoordinateTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
    PredictedTechnique,
)
from stretto.tune.trial import MAX_TRIAL_STEPS, SearchLimits, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.schema import Cluster, Plan
    from stretto.tune.search_space import Point, Space
    from stretto.tune.techniques import AbstractTechnique

    StepTime = Callable[[Point], float]


class TunedJob:
    """Steps whose times are the simulator's, with noise."""

    def __init__(
        self, space: Space, cluster: Cluster, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.space = space
        self.cluster = cluster
        self._noise = noise
        self.change_s = 10.0
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
        limits: SearchLimits | None = None,
        bound_s: float = 0.0,
        lost_before_s: float = 0.0,
    ) -> Search:
        return Search(
            starts=[("first", self.plan(start))],
            arms=arms,
            plan_of=self.plan,
            floor_s=lambda _plan: 0.0,
            bound_s=bound_s,
            limits=limits or SearchLimits(steps=100, lost_ratio=1e9),
            lost_before_s=lost_before_s,
        )

    def run(self, search: Search, outliers: Sequence[int] = ()) -> Search:
        number = 0
        before = None
        while (trial := search.next_trial()) is not None:
            if trial.plan.digest != before:
                search.step(self.change_s, counts=False)
            before = trial.plan.digest
            while True:
                number += 1
                step_s = self.step_s(trial.plan) * (10 if number in outliers else 1)
                if search.step(step_s):
                    break
        return search


@pytest.fixture
def job(space: Space, cluster: Cluster) -> TunedJob:
    return TunedJob(space, cluster)


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


def test_a_model_that_is_right_is_settled_within_twenty_steps(
    job: TunedJob, space: Space, step_s: StepTime
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
    assert search.incumbent.step_s == pytest.approx(best_s)
    assert search.steps_used <= 20
    assert search.ended == "the incumbent is as fast as the bound, within the noise"


def test_the_blind_ensemble_comes_near_within_its_budget(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    best_s = min(map(step_s, space.points))
    found = []
    for seed in range(9):
        job = TunedJob(space, cluster, noise=0.02, seed=seed)
        search = job.run(job.search(ensemble(space, seed), start=worst(space, step_s)))
        assert search.incumbent is not None
        assert 80 <= search.steps_used <= 100 + 2 * (MAX_TRIAL_STEPS + 1)
        found.append(job.true_s(search.incumbent.plan) / best_s)
    assert sorted(found)[len(found) // 2] < 1.05


def test_noise_alone_never_replaces_the_incumbent(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    kept = 0
    for seed in range(20):
        job = TunedJob(space, cluster, noise=0.05, seed=seed)
        search = job.run(job.search(ensemble(space, seed), start=best))
        assert search.incumbent is not None
        lost = job.true_s(search.incumbent.plan) / step_s(best) - 1
        assert lost < 0.05
        kept += lost == 0
    assert kept >= 15


def test_an_outlier_of_ten_times_changes_nothing(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    arms = {"predicted": PredictedTechnique(space, step_s, max_ratio=1.3)}
    calm = job.run(job.search(arms, start=worst(space, step_s)))
    arms = {"predicted": PredictedTechnique(space, step_s, max_ratio=1.3)}
    shaken = job.run(job.search(arms, start=worst(space, step_s)), outliers=(5, 14))
    assert calm.incumbent is not None
    assert shaken.incumbent is not None
    assert shaken.incumbent.plan.digest == calm.incumbent.plan.digest


def test_trials_lose_no_more_than_the_limit_and_one_pair(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = SearchLimits(steps=100, lost_ratio=0.02)
    search = job.run(job.search(ensemble(space), start=best, limits=limits))
    lost_s = sum(trial.lost_s(step_s(best)) for trial in search.trials[1:])
    worst_s = max(trial.lost_s(step_s(best)) for trial in search.trials[1:])
    # Each block's change was a step of 10 s; no more than twice the best is its doing.
    assert worst_s >= 2 * step_s(best)
    trained_s = 102 * step_s(best)
    assert lost_s <= 0.02 * (trained_s + 100 * step_s(best)) / 2 + 2 * worst_s
    tried = [t for t in search.trials if t.technique != CONTROL]
    assert all(trial.uncounted_s == [10.0] for trial in tried)


def test_pauses_count_among_what_is_lost(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = SearchLimits(steps=100, lost_ratio=0.05)
    search = job.search(ensemble(space), start=best, limits=limits)
    search.pause(0.05 * 100 * step_s(best))
    job.run(search)
    # Nothing is left for trials until the steps are over.
    assert [t.technique for t in search.trials[:2]] == [START, CONTROL]
    assert len(search.trials[1].steps_s) > 90


def test_noise_about_the_incumbent_is_no_loss() -> None:
    trial = Trial(technique="grid", key="any", plan=None, wanted_steps=4)  # type: ignore[arg-type]
    trial.steps_s += [0.9, 1.1, 1.0]
    assert trial.lost_s(1.0) == pytest.approx(0.0)
    trial.uncounted_s.append(1.5)
    assert trial.lost_s(1.0) == pytest.approx(0.5)
    trial.steps_s.append(50.0)
    assert trial.lost_s(1.0) == pytest.approx(2.5)


def test_a_search_that_can_win_little_costs_little(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.search(ensemble(space), start=best, bound_s=0.999 * step_s(best))
    job.run(search)
    could_win_s = 100 * 0.001 * step_s(best)
    assert search.max_lost_s == pytest.approx(could_win_s)
    assert len(search.trials) <= 3


def test_hopeless_trials_end_early_and_never_win(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.run(job.search(ensemble(space), start=best))
    early = [trial for trial in search.trials if trial.ended_early]
    assert early
    for trial in early:
        slow = trial.step_s / step_s(best)
        assert len(trial.steps_s) == (1 if slow > 1.6 else 2)
        assert not trial.won
        assert trial.step_s > 1.15 * step_s(best)


def test_a_plan_whose_floor_is_above_the_incumbent_is_never_tried(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = Search(
        starts=[("first", job.plan(best))],
        arms=ensemble(space),
        plan_of=job.plan,
        floor_s=job.true_s,
        bound_s=0.0,
        limits=SearchLimits(),
    )
    job.run(search)
    assert [trial.key for trial in search.trials] == ["first"]
    assert search.ended == "every technique is out of proposals"


def test_a_plan_that_can_not_run_is_marked_and_the_incumbent_stays(
    job: TunedJob, space: Space, step_s: StepTime
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


def test_a_plan_that_was_decided_on_is_not_measured_again(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    search = job.run(job.search(ensemble(space), start=worst(space, step_s)))
    measured: dict[str, int] = {}
    tried = [trial for trial in search.trials if trial.technique != CONTROL]
    last = None
    for trial in tried:
        digest = trial.plan.digest
        if digest != last:  # otherwise another pair of the same comparison
            steps = measured.get(digest, 0)
            assert trial.wanted_steps > steps  # only for more steps, as Hyperband asks
        measured[digest] = trial.wanted_steps
        last = digest
    assert len(measured) > 5


def steps_before_a_challenger(search: Search, step_s: float) -> tuple[int, int]:
    """Steps until a second plan is tried, and of these the longest time unasked."""
    steps = longest = 0
    while (trial := search.next_trial()) is not None:
        if trial.technique not in ("start", CONTROL):
            break
        over = False
        while not over:
            ahead = search.ahead
            longest = max(longest, ahead)
            for _ in range(ahead):
                steps += 1
                over = search.step(step_s)
                if over:
                    break
    return steps, longest


def test_a_search_waits_until_what_was_lost_before_it_is_a_small_share(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    limits = SearchLimits(steps=100, lost_ratio=0.02)
    start = min(space.points, key=step_s)
    level_s = step_s(start)
    found = {}
    for lost in (0.0, 2.0, 8.0, 1e6):
        search = job.search(
            {"predicted": PredictedTechnique(space, step_s)},
            start=start,
            limits=limits,
            lost_before_s=lost * level_s,
        )
        search._floor_s = lambda _plan: 0.0
        found[lost] = steps_before_a_challenger(search, level_s)[0]
        assert search.steps_used <= limits.steps  # waiting is not searching
    # 2 and 8 steps' time are 4 % of 50 and of 200 steps; the last waits no longer than
    # five times the limit.
    assert found[0.0] < 50 <= found[2.0] < 75
    assert 200 <= found[8.0] < 225
    assert 500 <= found[1e6] < 525


def test_the_incumbent_s_steps_need_a_decision_now_and_then_only(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    search = job.search(
        {"predicted": PredictedTechnique(space, step_s)},
        start=min(space.points, key=step_s),
        limits=SearchLimits(steps=100, lost_ratio=0.02),
        lost_before_s=3.0,
    )
    steps, longest = steps_before_a_challenger(search, 0.03)
    assert steps > 20
    assert longest == MAX_TRIAL_STEPS


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(SpecError, match="steps must be >= 1, got 0"):
        SearchLimits(steps=0)
    with pytest.raises(SpecError, match="lost_ratio must be >= 0, got nan"):
        SearchLimits(lost_ratio=math.nan)


def test_a_slow_spell_under_one_block_does_not_decide(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    slower = next(p for p in order if 1.02 < step_s(p) / step_s(order[0]) < 1.08)
    starts = [("best", job.plan(order[0])), ("slower", job.plan(slower))]
    search = Search(
        starts=starts,
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=0.0,
        limits=SearchLimits(lost_ratio=1e9),
    )
    number = 0
    while (trial := search.next_trial()) is not None:
        over = False
        while not over:
            number += 1  # the spell lies under the best plan's first two blocks
            spell = 1.09 if number <= 3 or 7 <= number <= 8 else 1.0
            over = search.step(spell * job.step_s(trial.plan))
    assert search.incumbent is not None
    assert search.incumbent.key == "best"


def test_the_machine_slowing_down_under_a_search_is_not_the_plans_doing(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    search = Search(
        starts=[("slow", job.plan(order[-1])), ("best", job.plan(order[0]))],
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=0.0,
        limits=SearchLimits(lost_ratio=1e9),
    )
    pace = 1.0
    while (trial := search.next_trial()) is not None:
        over = False
        while not over:
            pace *= 1.05
            over = search.step(pace * job.step_s(trial.plan))
    assert search.incumbent is not None
    assert search.incumbent.key == "best"


def against_ddp(job: TunedJob, plan: Plan, ddp: Plan, **more: float) -> Search:
    return Search(
        starts=[("planner", plan)],
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=more.get("bound_s", 0.0),
        limits=SearchLimits(lost_ratio=more.get("lost_ratio", 1e9)),
        baseline=ddp,
    )


def test_a_plan_stays_only_where_it_beats_ddp_s_buckets_measured(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    fast, slow = job.plan(order[0]), job.plan(order[-1])
    kept = job.run(against_ddp(job, fast, slow))
    assert kept.incumbent is not None
    assert kept.incumbent.plan is fast
    ratio = step_s(order[0]) / step_s(order[-1])
    assert kept.lead is not None
    assert kept.lead.ratio == pytest.approx(ratio)
    ddp_s = kept.step_s_of(slow.digest)
    assert ddp_s == pytest.approx(step_s(order[-1]))
    given_up = job.run(against_ddp(job, slow, fast))
    assert given_up.incumbent is not None
    assert given_up.incumbent.plan is fast


def test_on_a_tie_ddp_s_buckets_stay(
    space: Space, cluster: Cluster, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    near = next(p for p in order[1:] if step_s(p) / step_s(order[0]) < 1.015)
    for seed in range(20):
        job = TunedJob(space, cluster, noise=0.01, seed=seed)
        search = job.run(against_ddp(job, job.plan(order[0]), job.plan(near)))
        assert search.incumbent is not None
        assert search.incumbent.plan.digest == job.plan(near).digest


def test_a_comparison_with_slow_buckets_waits_until_it_has_been_earned(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    job.change_s = 1.1 * step_s(order[-1])
    search = against_ddp(job, job.plan(order[0]), job.plan(order[-1]), lost_ratio=0.015)
    search._floor_s = job.true_s  # the model knows how slow it is
    job.run(search)
    final = [t for t in search.trials if t.technique == FINAL]
    assert len(final) == 1
    assert len(final[0].steps_s) == 1
    before = search.trials[: search.trials.index(final[0])]
    assert sum(len(t.steps_s) for t in before) >= 90
    assert search.incumbent is not None
    assert search.incumbent.plan.digest == job.plan(order[0]).digest


def test_noisy_steps_are_not_as_fast_as_the_bound(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    """533 ms with a spread of 200 are not the 258 of the bound."""
    order = sorted(space.points, key=step_s)
    search = Search(
        starts=[("first", job.plan(order[-1]))],
        arms={"predicted": PredictedTechnique(space, step_s)},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=0.258,
        limits=SearchLimits(lost_ratio=1e9),
    )
    search.next_trial()
    for one_s in (0.333, 0.533, 0.733):
        over = search.step(one_s)
    assert over
    following = search.next_trial()
    assert following is not None
    assert following.technique == "predicted"


def test_a_bound_that_steps_refute_ends_nothing(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    search = Search(
        starts=[("first", job.plan(order[-1]))],
        arms={"predicted": PredictedTechnique(space, step_s)},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=2 * step_s(order[-1]),
        limits=SearchLimits(lost_ratio=1e9),
    )
    job.run(search)
    assert search.incumbent is not None
    assert search.incumbent.plan.digest == job.plan(order[0]).digest


def test_nothing_is_learned_from_a_first_block_slower_than_steps_before_it(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    plan, profiled = job.plan(order[0]), job.plan(order[-1])
    for slowdown, learned in ((1.0, 1), (9.0, 0)):
        search = Search(
            starts=[("planner", plan), ("profiled", profiled)],
            arms={},
            plan_of=job.plan,
            floor_s=lambda _plan: 0.0,
            bound_s=0.0,
            limits=SearchLimits(lost_ratio=1e9),
            seen_s={profiled.digest: 1.5 * step_s(order[0])},
        )
        search.next_trial()
        while not search.step(slowdown * step_s(order[0])):
            pass
        assert len(search.findings()) == learned
        following = search.next_trial()
        # The profiled plan is tried only where it was faster than the first.
        assert (following is None) == (learned == 1)


def test_one_plan_alone_needs_no_last_comparison(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    search = job.run(job.search({}, start=best))
    assert [trial.technique for trial in search.trials] == ["start"]


def test_short_steps_are_tried_for_longer(job: TunedJob, space: Space) -> None:
    search = job.search({}, start=space.points[0])
    assert search.next_trial() is not None
    assert [search.step(0.05) for _ in range(5)] == [False] * 4 + [True]


def test_what_was_there_before_is_tried_whatever_the_bound_says(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    order = sorted(space.points, key=step_s)
    search = Search(
        starts=[("a", job.plan(order[-1])), ("b", job.plan(order[0]))],
        arms={},
        plan_of=job.plan,
        floor_s=lambda _plan: 0.0,
        bound_s=2 * step_s(order[-1]),
        limits=SearchLimits(),
    )
    job.run(search)
    assert search.incumbent is not None
    assert search.incumbent.key == "b"


def test_patience_ends_a_search_that_brings_nothing(
    job: TunedJob, space: Space, step_s: StepTime
) -> None:
    best = min(space.points, key=step_s)
    limits = SearchLimits(lost_ratio=1e9, patience=5)
    search = job.run(job.search(ensemble(space), start=best, limits=limits))
    tried = [trial for trial in search.trials if trial.technique not in (START, FINAL)]
    assert len(tried) >= 5
    assert not any(trial.won for trial in tried)
    assert search.ended == "5 consecutive trials were no better"
    with pytest.raises(SpecError, match="patience must be >= 1, got 0"):
        SearchLimits(patience=0)
