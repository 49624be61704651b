"""The exact search against brute force, dense tables and the published algorithm."""

from __future__ import annotations

import random

import pytest
from burst_graphs import (
    Oracle,
    chain_of,
    random_network,
    random_profile,
    random_shape,
)

from stretto.cost.burst import widths_of
from stretto.errors import Infeasible
from stretto.planners.burst.evaluate import evaluate
from stretto.planners.burst.plan import nearest_limit, plan
from stretto.planners.burst.problem import BurstProblem
from stretto.planners.burst.search import shortest


def case(rng, shape, *, gpus, batch, widths, limit):
    profile, network = random_profile(rng, shape, batch), random_network(rng)
    problem = BurstProblem.of(
        profile,
        network,
        gpus=gpus,
        batch=batch,
        widths=widths,
        amplification_limit=limit,
    )
    every = widths_of(widths, gpus, batch)
    return problem, Oracle(profile, network, shape, gpus, batch, every, limit)


def check(problem, oracle):
    found, best_s = shortest(problem), oracle.best()
    assert found is not None
    time_s, choice = found
    assert time_s == pytest.approx(best_s, rel=1e-12)
    cost = evaluate(problem, choice)
    assert cost.iteration_s == pytest.approx(time_s, rel=1e-12)
    assert cost.gpus <= problem.gpus
    if problem.amplification_limit is not None:
        assert cost.max_amplification <= problem.amplification_limit * (1 + 1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_is_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    limit = rng.choice([None, 1.0, 1.3, 2.0, 4.0])
    widths = rng.choice(["powers", "divisors", "all"])
    check(
        *case(
            rng,
            chain_of(rng.randint(1, 4)),
            gpus=5,
            batch=6,
            widths=widths,
            limit=limit,
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    limit = rng.choice([None, None, 1.3, 2.0, 4.0])
    gpus = rng.choice([2, 3, 4])
    check(
        *case(rng, random_shape(rng, 1), gpus=gpus, batch=4, widths="all", limit=limit)
    )


def test_branches_get_gpus_of_their_own_where_that_helps():
    owned = 0
    for seed in range(20):
        rng = random.Random(seed)
        problem, _ = case(
            rng, random_shape(rng, 2), gpus=8, batch=8, widths="all", limit=None
        )
        _, choice = shortest(problem)
        owned += bool(choice.own)
    assert owned > 3


@pytest.mark.parametrize("seed", range(8))
def test_an_unreachable_limit_names_the_nearest_that_can_be_met(seed):
    rng = random.Random(seed)
    shape = random_shape(rng, 1) if seed % 2 else chain_of(3)
    problem, oracle = case(rng, shape, gpus=4, batch=4, widths="all", limit=0.05)
    best = min(amp for _, _, amp, _ in oracle.every())
    assert nearest_limit(problem) == pytest.approx(best, rel=1e-9)
    with pytest.raises(Infeasible, match=r"nearest limit that one keeps is [\d.]+"):
        plan(problem)
