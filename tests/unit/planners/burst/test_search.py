"""The exact search against brute force, dense tables and the published algorithm."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from stretto.cost.burst import widths_of
from stretto.errors import Infeasible
from stretto.papers.deeppool_literal import search_linear
from stretto.planners.burst import search
from stretto.planners.burst.edges import EdgeCost
from stretto.planners.burst.evaluate import evaluate
from stretto.planners.burst.front import front
from stretto.planners.burst.plan import nearest_limit, plan
from stretto.planners.burst.problem import BurstProblem, Choice
from stretto.planners.burst.search import shortest
from support.burst_graphs import (
    Oracle,
    chain_of,
    random_network,
    random_profile,
    random_shape,
)


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


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    limit = rng.choice([None, None, 1.3, 2.0, 4.0])
    gpus = rng.choice([2, 3, 4])
    check(
        *case(rng, random_shape(rng, 1), gpus=gpus, batch=4, widths="all", limit=limit)
    )


@pytest.mark.parametrize("seed", range(12))
def test_blocks_within_branches_are_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    inner = [1, [[2], [3]], 4]
    shape = [0, [inner, [5]], 6] if seed % 2 else [0, [inner, []], 5]
    gpus = 2 + seed % 3
    check(*case(rng, shape, gpus=gpus, batch=2, widths="all", limit=None))


@pytest.mark.parametrize("seed", range(24))
def test_branches_that_end_with_a_block_are_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    shape = [
        [0, [[1, [[2], [3]]], [4]], 5],
        [0, [[1, [[2], [3, 4]]], [5]], 6],
        [0, [[1, [[2], []]], []], 3],
        [0, [[1, [[2, [[3], [4]]], [5]]], [6]], 7],
    ][seed % 4]
    limit = rng.choice([None, None, 2.0, 4.0])
    batch = 3 if len(shape[1]) == 2 and shape[-1] < 6 else 2
    gpus = 2 + seed % 3
    check(*case(rng, shape, gpus=gpus, batch=batch, widths="all", limit=limit))


@pytest.mark.parametrize("seed", range(8))
def test_bounds_for_groups_of_widths_keep_the_best_of_all_choices(seed, monkeypatch):
    monkeypatch.setattr(search, "_GROUP", 2)
    rng = random.Random(seed)
    limit = [None, 2.0][seed % 2]
    shape = [0, [[1], [2, 3], []], 4]
    check(*case(rng, shape, gpus=4, batch=5, widths="all", limit=limit))


@pytest.mark.parametrize("seed", range(6))
def test_bounds_for_groups_of_widths_leave_the_time_as_it_is(seed, monkeypatch):
    rng = random.Random(seed)
    shape = random_shape(rng, 4)
    limit = [None, 3.0][seed % 2]
    problem, _ = case(rng, shape, gpus=96, batch=96, widths="all", limit=limit)
    time_s, choice = shortest(problem)
    cost = evaluate(problem, choice)
    assert cost.iteration_s == pytest.approx(time_s, rel=1e-12)
    assert cost.gpus <= problem.gpus
    monkeypatch.setattr(search, "_MAX_GROUPED", 0)
    assert time_s == pytest.approx(shortest(problem)[0], rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_two_blocks_one_after_another_share_the_layer_between(seed):
    rng = random.Random(seed)
    shape = [0, [[1], []], 2, [[3], [4]], 5]
    check(*case(rng, shape, gpus=3, batch=3, widths="powers", limit=3.0))


def dense_chain_s(problem):
    """The chain's shortest path over each pair of widths, from the definitions."""
    widths, best = problem.widths, None
    single = problem.single_s
    for i in range(len(problem.profile.layers)):
        now = []
        for k, g in enumerate(widths):
            own = problem.node_s[i][k]
            ways = [math.inf]
            for h in range(len(widths)) if best else [k]:
                comm = problem.comm_s(i - 1, h, k, moved=False) if best else 0.0
                limit = problem.amplification_limit
                if limit and (comm + own) * g > limit * (1 + 1e-9) * single[i]:
                    continue
                ways.append((best[h] if best else 0.0) + comm + own)
            now.append(min(ways))
        best = now
    return min(best)


@pytest.mark.parametrize("limit", [None, 1.2, 1.7, 3.0])
def test_all_counts_by_windows_equal_the_dense_program(limit):
    rng = random.Random(str(limit))
    profile = random_profile(rng, chain_of(5), 260)
    network = random_network(rng)
    problem = BurstProblem(
        profile=profile,
        network=network,
        gpus=256,
        batch=260,
        widths=tuple(range(1, 257)),
        amplification_limit=limit,
    )
    expected_s = dense_chain_s(problem)
    assert shortest(problem)[0] == pytest.approx(expected_s, rel=1e-12)
    fewer = BurstProblem.of(
        profile,
        network,
        gpus=256,
        batch=260,
        widths="all",
        amplification_limit=limit,
    )
    assert len(fewer.widths) < 40
    assert shortest(fewer)[0] == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("limit", [None, 1.2, 3.0])
def test_windows_equal_each_pair_looked_at(limit, moved):
    rng = random.Random(7)
    problem, _ = case(rng, chain_of(2), gpus=90, batch=91, widths="all", limit=limit)
    problem = replace(problem, widths=tuple(range(1, 91)))
    edge = EdgeCost(problem, 0, 1, moved=moved)
    times = np.array([[rng.uniform(0, 1e-2) for _ in range(90)] for _ in range(60)])
    pairs = (times[:, :, None] + edge.dense_hk).min(axis=1)
    np.testing.assert_allclose(edge.relax(times), pairs, rtol=1e-12)
    columns = np.array([edge.column(k) for k in range(90)]).T
    np.testing.assert_array_equal(columns, edge.dense_hk)


def test_more_gpus_or_a_higher_limit_never_cost_time():
    rng = random.Random(3)
    shape = random_shape(rng, 3)
    profile, network = random_profile(rng, shape, 16), random_network(rng)
    for vary, values in (("gpus", (2, 4, 8, 16)), ("limit", (1.0, 1.5, 2.5, 9.0))):
        times = []
        for value in values:
            problem = BurstProblem.of(
                profile,
                network,
                gpus=value if vary == "gpus" else 16,
                batch=16,
                widths="all",
                amplification_limit=None if vary == "gpus" else value,
            )
            times.append(shortest(problem)[0])
        assert times == sorted(times, reverse=True)


def literal(problem, **order):
    """Algorithm 1's plan for a chain, as widths."""
    sync = [
        [problem.network.sync_s(layer.parameter_bytes, g) for g in problem.widths]
        for layer in problem.profile.layers
    ]
    comp = [
        [own - s for own, s in zip(row, syncs, strict=True)]
        for row, syncs in zip(problem.node_s.tolist(), sync, strict=True)
    ]
    return search_linear(
        comp,
        sync,
        lambda i, h, k: problem.comm_s(i - 1, h, k, moved=False),
        problem.widths,
        problem.amplification_limit,
        **order,
    )


def test_algorithm_1_as_printed_passes_its_limit_and_the_exact_search_never():
    passed = descending = 0
    for seed in range(100):
        rng = random.Random(seed)
        problem, _ = case(rng, chain_of(6), gpus=8, batch=8, widths="powers", limit=1.5)
        for order in (None, [3, 2, 1, 0]):
            _, widths = literal(problem, order=order)
            worst = evaluate(problem, Choice(widths=widths)).max_amplification
            passed += order is None and worst > 1.5 * (1 + 1e-9)
            descending += order is not None and worst > 1.5 * (1 + 1e-9)
        _, exact = shortest(problem)
        assert evaluate(problem, exact).max_amplification <= 1.5 * (1 + 1e-8)
    assert passed > 30
    assert descending >= passed


def test_algorithm_1_prefers_the_slower_plan_that_it_met_first():
    # The limit is 2. One GPU before: amplification 5, 10 s. Two GPUs: 1.2, 12 s. The
    # first is taken though it passes the limit, and then the second is too slow.
    comp = [[2.0, 12.0 * 1.2 / 24], [1.0, 1.0]]
    sync = [[8.0, 11.4], [0.0, 0.0]]
    total_s, widths = search_linear(comp, sync, lambda *_: 0.0, (1, 2), 2.0)
    assert widths[0] == 0
    assert total_s == pytest.approx(11.0)


def hull_of(points):
    """Lower convex hull by trying each point against each line."""
    best = sorted(set(points))
    kept = []
    for x, y in best:
        if any(a <= x and b <= y and (a, b) != (x, y) for a, b in best):
            continue
        above = any(
            a < x < c and b + (d - b) * (x - a) / (c - a) <= y * (1 + 1e-12)
            for a, b in best
            for c, d in best
            if a < x < c
        )
        if not above:
            kept.append((x, y))
    return kept


@pytest.mark.parametrize("seed", range(12))
def test_the_front_is_the_hull_of_all_choices(seed):
    rng = random.Random(seed)
    problem, oracle = case(
        rng, chain_of(3), gpus=4, batch=6, widths="all", limit=[None, 2.0][seed % 2]
    )
    points = [
        (time, gpu_s)
        for time, gpu_s, amp, _ in oracle.every()
        if oracle.limit is None or amp <= oracle.limit * (1 + 1e-9)
    ]
    found = [(cost.iteration_s, cost.gpu_s) for cost, _ in front(problem)]
    assert found == [pytest.approx(point, rel=1e-9) for point in hull_of(points)]


def test_a_graphs_front_starts_with_its_fastest_plan_and_ends_on_one_gpu():
    rng = random.Random(1)
    problem, _ = case(
        rng,
        random_shape(rng, 3, nested=True),
        gpus=8,
        batch=8,
        widths="all",
        limit=None,
    )
    costs = [cost for cost, _ in front(problem)]
    assert costs[0].iteration_s == pytest.approx(shortest(problem)[0])
    times, gpu_times = [c.iteration_s for c in costs], [c.gpu_s for c in costs]
    assert times == sorted(times)
    assert gpu_times == sorted(gpu_times, reverse=True)
    assert all(c.gpus <= 8 for c in costs)


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
    with pytest.raises(Infeasible, match=r"nearest feasible limit is [\d.]+"):
        plan(problem)
