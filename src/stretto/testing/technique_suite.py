"""The suite that every tuning technique must pass.

@pytest.mark.parametrize("check", technique_checks(MyTechnique), ids=str)
def test_contract(check):
    check()
"""

from __future__ import annotations

import math
import random
from functools import cache, partial
from typing import TYPE_CHECKING

from stretto.planners.base import predicted_s
from stretto.testing.checks import Check
from stretto.testing.instances import capped_cluster, small_workload
from stretto.tune.search_space import Space
from stretto.tune.techniques.base import MIN_STEPS, Proposal, SearchContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.tune.search_space import Point
    from stretto.tune.techniques.base import AbstractTechnique


def technique_checks(technique: type[AbstractTechnique]) -> list[Check]:
    """Return the checks of a technique, over a small job on a capped network."""
    return [
        Check(name, partial(run, technique))
        for name, run in (
            ("proposals are canonical points", _proposes_points),
            ("equal seeds and results give equal proposals", _repeats),
            ("points that cannot run and others' results are accepted", _accepts),
        )
    ]


@cache
def small_space() -> Space:
    """Return the points of the small job."""
    return Space(small_workload())


def step_s(point: Point) -> float:
    """Return a point's step time on the capped cluster in seconds, infinite outside."""
    return _known().get(point, math.inf)


def context(seed: int = 0) -> SearchContext:
    """Return a search over the small job, whose model predicts the exact times."""
    rng = random.Random(seed)
    return SearchContext(
        space=small_space(),
        seed=seed,
        start=rng.choice(small_space().points),
        rng=random.Random(seed),
        predict_s=step_s,
    )


def proposed(
    technique: AbstractTechnique, step_s: Callable[[Point], float], trials: int
) -> list[Point]:
    """Return the points that a technique proposes, each answered by its time."""
    asked: list[Point] = []
    for _ in range(trials):
        proposal = technique.ask()
        if proposal is None:
            break
        asked.append(proposal.point)
        technique.tell(proposal, step_s(proposal.point), mine=True)
    return asked


@cache
def _known() -> dict[Point, float]:
    space, cluster = small_space(), capped_cluster()
    return {point: predicted_s(space.plan(point, cluster)) for point in space.points}


def _proposes_points(technique: type[AbstractTechnique]) -> None:
    asked = proposed(technique.of(context()), step_s, 60)
    assert asked, "nothing was proposed"
    strange = set(asked) - set(small_space().points)
    assert not strange, f"no canonical points of the space: {sorted(strange)}"


def _repeats(technique: type[AbstractTechnique]) -> None:
    first, second = (proposed(technique.of(context()), step_s, 40) for _ in range(2))
    assert first == second, "equal searches got different proposals"


def _accepts(technique: type[AbstractTechnique]) -> None:
    made = technique.of(context())
    rng = random.Random(1)
    for turn in range(40):
        proposal = made.ask()
        if proposal is None:
            break
        assert proposal.steps >= MIN_STEPS, f"{proposal.steps} steps give no median"
        broken = turn % 5 == 0
        time_s = math.inf if broken else step_s(proposal.point)
        made.tell(proposal, time_s, mine=True)
        foreign = Proposal(point=rng.choice(small_space().points))
        made.tell(foreign, step_s(foreign.point), mine=False)
