"""Every technique keeps the contract and beats chance where it claims to."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.testing.technique_suite import proposed as run
from stretto.testing.technique_suite import technique_checks
from stretto.tune.techniques import (
    AbstractTechnique,
    BayesTechnique,
    CoordinateTechnique,
    GridTechnique,
    HyperbandTechnique,
    PopulationTechnique,
    PredictedTechnique,
    Proposal,
    technique_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.testing.checks import Check
    from stretto.tune.search_space import Point, Space

    StepTime = Callable[[Point], float]

NAMES = ("grid", "population", "bayes", "hyperband", "coordinate", "predicted")


def made(
    name: str, space: Space, step_s: StepTime, *, seed: int = 0
) -> AbstractTechnique:
    if name == "grid":
        return GridTechnique(space)
    if name == "population":
        return PopulationTechnique(space, random.Random(seed))
    if name == "bayes":
        pytest.importorskip("optuna", reason="stretto[tune] is not installed")
        return BayesTechnique(space, seed=seed)
    if name == "hyperband":
        return HyperbandTechnique(space, random.Random(seed))
    if name == "coordinate":
        start = random.Random(seed).choice(space.points)
        return CoordinateTechnique(space, start)
    return PredictedTechnique(space, step_s)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}: {check}")
        for name in NAMES
        for check in technique_checks(technique_of(name))
    ],
)
def test_contract_holds(name: str, check: Check) -> None:
    if name == "bayes":
        pytest.importorskip("optuna", reason="stretto[tune] is not installed")
    check()


class Endless(AbstractTechnique):
    """Proposes a point outside of the space, or one of its own choice."""

    name = "endless"
    outside = True
    drawn = random.Random(0)

    def __init__(self, space: Space) -> None:
        self._points = space.points

    def ask(self) -> Proposal:
        point = self.drawn.choice(self._points)
        return Proposal(point=(-1, *point[1:]) if self.outside else point)

    def tell(self, proposal: Proposal, step_s: float, *, mine: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("outside", "fact", "found"),
    [
        (True, 0, "no canonical points"),
        (False, 1, "equal searches got different proposals"),
    ],
)
def test_the_suite_finds_broken_techniques(
    outside: bool, fact: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endless, "outside", outside)
    with pytest.raises(AssertionError, match=found):
        technique_checks(Endless)[fact]()


@pytest.mark.parametrize("name", ["bayes", "population", "coordinate"])
def test_what_learns_spends_its_later_trials_on_better_points(
    name: str, space: Space, step_s: StepTime
) -> None:
    average_s = fmean(map(step_s, space.points))
    late_s = []
    for seed in range(12):
        asked = run(made(name, space, step_s, seed=seed), step_s, 30)
        late_s.append(fmean(map(step_s, asked[len(asked) // 2 :])))
    assert fmean(late_s) < average_s
    assert sum(value < average_s for value in late_s) >= 10


def test_the_grid_tries_every_point_once_spread_over_it(
    space: Space, step_s: StepTime
) -> None:
    asked = run(GridTechnique(space), step_s, 10_000)
    assert sorted(asked) == sorted(space.points)
    place = {point: i for i, point in enumerate(space.points)}
    early = sorted(place[point] for point in asked[:8])
    gaps = [b - a for a, b in pairwise(early)]
    assert max(gaps) <= len(space.points) // 4


def test_hyperband_gives_the_better_third_more_steps(
    space: Space, step_s: StepTime
) -> None:
    technique = HyperbandTechnique(space, random.Random(0), max_steps=27)
    rungs: list[tuple[int, Point]] = []
    for _ in range(9 + 3 + 1):
        proposal = technique.ask()
        assert proposal is not None
        rungs.append((proposal.steps, proposal.point))
        technique.tell(proposal, step_s(proposal.point), mine=True)
    assert [steps for steps, _ in rungs] == [3] * 9 + [9] * 3 + [27]
    best_first = sorted({point for steps, point in rungs if steps == 3}, key=step_s)
    assert {p for steps, p in rungs if steps == 9} == set(best_first[:3])
    assert rungs[-1][1] == best_first[0]
    following = technique.ask()
    assert following is not None
    assert following.steps == 9  # the next, deeper bracket


def test_coordinate_descent_ends_where_no_neighbor_is_better(
    space: Space, step_s: StepTime
) -> None:
    technique = CoordinateTechnique(space, space.points[0])
    asked = run(technique, step_s, 10_000)
    best = min(asked, key=step_s)
    for axis, length in enumerate(space.shape):
        for place in (best[axis] - 1, best[axis] + 1):
            if 0 <= place < length:
                moved = space.canonical((*best[:axis], place, *best[axis + 1 :]))
                assert step_s(moved) >= step_s(best)
    assert technique.ask() is None
    assert len(asked) < len(space.points)


def test_where_predictions_were_wrong_more_of_them_are_tried(space, step_s):
    doubt = [0.0]
    technique = PredictedTechnique(space, step_s, doubt_ratio=lambda: doubt[0])
    best_s = min(step_s(point) for point in space.points)

    def all_left() -> list[float]:
        asked = run(technique, step_s, 10_000)
        return [step_s(point) for point in asked]

    assert max(all_left()) <= 1.10 * best_s
    assert all_left() == []
    doubt[0] = 0.2
    assert 1.10 * best_s < max(all_left()) <= 1.20 * best_s
    doubt[0] = 5.0
    assert 1.20 * best_s < max(all_left()) <= 1.30 * best_s


def test_the_prediction_orders_proposals_and_ends_where_they_get_poor(
    space: Space, step_s: StepTime
) -> None:
    asked = run(PredictedTechnique(space, step_s, max_ratio=1.05), step_s, 10_000)
    times_s = [step_s(point) for point in asked]
    assert times_s == sorted(times_s)
    best_s = min(map(step_s, space.points))
    assert len(asked) == sum(step_s(p) <= 1.05 * best_s for p in space.points)


def test_options_out_of_range_are_refused(space: Space) -> None:
    with pytest.raises(SpecError, match="members must be >= 2"):
        PopulationTechnique(space, random.Random(0), members=1)
    with pytest.raises(SpecError, match="max_steps must be >= 3"):
        HyperbandTechnique(space, random.Random(0), max_steps=2)
    with pytest.raises(SpecError, match="factor must be >= 2"):
        HyperbandTechnique(space, random.Random(0), factor=1)
