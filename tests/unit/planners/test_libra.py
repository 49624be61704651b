"""LIBRA's searches against each other, brute force, the paper and the simulator."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from stretto import planners
from stretto.errors import Infeasible, SpecError
from stretto.planners._libra import grid as grid_module
from stretto.planners._libra import pareto
from stretto.planners._libra.bound import FluidBound, GridBound
from stretto.planners._libra.grid import solve_grid
from stretto.planners._libra.literal import solve_literal, stage_s
from stretto.planners._libra.pareto import solve_pareto
from stretto.planners._libra.problem import (
    STARTUPS,
    Level,
    LibraProblem,
    first_chunk,
    problem_of,
)
from stretto.planners.exhaustive import all_fusions
from stretto.schema import ComputeContention, Contention, RateCurve

EXACT = 1e-12

CONTENTION = Contention(
    compute=ComputeContention(alpha1=1.0, alpha2=0.08),
    overlapped=RateCurve(gamma1=5.2e7, gamma2=5e7, gamma3=0.5, gamma4=0.6),
    exclusive=RateCurve(gamma1=6e7, gamma2=5.5e7, gamma3=0.5, gamma4=0.6),
    resources=(1, 2, 4),
)


def random_problem(seed: int, *, most: int = 7, levels: int = 3, runs: bool = False):
    """Bursts and mixtures, start-ups from none to dominating, light and heavy loads.

    Sending beside work never delays more than sending after it (assumption 3), and is
    never faster than it (assumption 2).
    """
    rng = random.Random(seed)
    number = rng.randint(1, most)
    work_s = rng.choice((0.3, 1.0, 2.5))
    if rng.random() < 0.6:
        ready = sorted(rng.random() * work_s for _ in range(number))
    else:
        ready = sorted(rng.choice((0, 0.3, 0.7, 1)) * work_s for _ in range(number))
    sizes = [2 ** rng.uniform(0, 8) for _ in range(number)]
    per_byte = work_s / sum(sizes) * rng.choice((0.3, 0.8, 1.5))
    chosen = []
    for j in range(levels):
        sigma = rng.choice((1.0, rng.uniform(0.5, 1.0)))
        overlapped = per_byte * rng.uniform(0.5, 1.5)
        chosen.append(
            Level(
                resource=j + 1,
                sigma=sigma,
                s_per_byte=overlapped,
                idle_s_per_byte=overlapped * rng.uniform(max(0.6, 1.0 - sigma), 1.0),
            )
        )
    firsts = [0] * number
    if runs:
        for i in range(1, number):
            firsts[i] = i if rng.random() < 0.3 else firsts[i - 1]
    return LibraProblem(
        ready_s=tuple(ready),
        total_bytes=(0, *itertools.accumulate(sizes)),
        firsts=tuple(firsts),
        work_s=work_s,
        startup_s=rng.choice((0.0, 0.01, 0.1, 1.0)) * work_s,
        levels=tuple(chosen),
        startup=rng.choice(STARTUPS),
    )


def fusions(problem: LibraProblem):
    inner = range(1, problem.size)
    for cuts in itertools.product((False, True), repeat=problem.size - 1):
        ends = (*itertools.compress(inner, cuts), problem.size)
        begins = (0, *ends[:-1])
        if all(problem.firsts[e - 1] <= b for b, e in zip(begins, ends, strict=True)):
            yield ends


def brute_force_s(problem: LibraProblem, max_groups: int | None = None) -> float:
    every = range(len(problem.levels))
    return min(
        problem.backward_s(ends, levels)
        for ends in fusions(problem)
        if max_groups is None or len(ends) <= max_groups
        for levels in itertools.product(every, repeat=len(ends))
    )


def follow(problem: LibraProblem, ends, levels) -> float:
    """Eq. 7-15 step by step with start-up mixed, written apart from the library."""
    left = problem.work_s
    time = begin = 0
    for end, j in zip(ends, levels, strict=True):
        level = problem.levels[j]
        size = problem.total_bytes[end] - problem.total_bytes[begin]
        begin = end
        wait = max(0.0, left - (problem.work_s - problem.ready_s[end - 1]))
        time, left = time + wait, left - wait
        full = level.s_per_byte * size + problem.startup_s
        g = left / level.sigma
        overlap = min(full, g)
        time += overlap
        if left:
            left *= 1 - overlap / g
        if full > g:
            left = 0.0
            idle = level.idle_s_per_byte * size + problem.startup_s
            time += idle * (1 - overlap / full)
    return time + left


@pytest.mark.parametrize("seed", range(60))
def test_the_exact_time_is_the_paper_s_recursion(seed) -> None:
    problem = replace(random_problem(seed), startup="mixed")
    rng = random.Random(seed)
    ends = rng.choice(list(fusions(problem)))
    levels = [rng.randrange(len(problem.levels)) for _ in ends]
    assert problem.backward_s(ends, levels) == pytest.approx(
        follow(problem, ends, levels), rel=1e-12
    )


@pytest.mark.parametrize("seed", range(60))
def test_grid_is_the_literal_algorithm(seed, monkeypatch) -> None:
    if seed % 2:
        monkeypatch.setattr(grid_module, "_SMALL", 0)  # with limits
    rng = random.Random(1000 + seed)
    problem = random_problem(
        seed, most=6, levels=rng.choice((1, 2, 3)), runs=seed % 3 == 0
    )
    chunks = rng.choice((3, 7, 12))
    groups = max(problem.fewest_groups, rng.randint(1, 4))
    literal = solve_literal(problem, max_groups=groups, chunks=chunks)
    grid = solve_grid(problem, max_groups=groups, chunks=chunks)
    assert grid.backward_s == pytest.approx(literal.backward_s, rel=EXACT)
    assert len(grid.ends) <= groups
    for found in (literal, grid):
        off_grid_s = problem.backward_s(found.ends, found.levels)
        assert off_grid_s <= found.backward_s * (1 + EXACT)
    free = solve_literal(problem, max_groups=problem.size, chunks=chunks)
    assert solve_grid(problem, chunks=chunks).backward_s == pytest.approx(
        free.backward_s, rel=EXACT
    )


@pytest.mark.parametrize("block", range(10))
def test_pareto_is_brute_force(block) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(
            seed, most=7 if seed % 5 == 0 else 5, runs=seed % 3 == 0
        )
        best_s = brute_force_s(problem)
        assert solve_pareto(problem, slack_s=0.0).backward_s == pytest.approx(
            best_s, rel=EXACT
        )


@pytest.mark.parametrize("seed", range(60))
def test_bounds_are_never_above_what_is_reached(seed, monkeypatch) -> None:
    problem = random_problem(seed, most=5, runs=seed % 3 == 0)
    best_s = brute_force_s(problem)
    fluid = FluidBound(problem)
    for bound in (fluid, *(GridBound(problem, fluid, z, math.inf) for z in (4, 30))):
        at_start = bound.of(np.array([0]), np.array([problem.ready_s[0]]))
        assert problem.work_s + at_start[0] <= best_s * (1 + EXACT)
    monkeypatch.setattr(pareto, "GRID_FROM", 0)
    found = solve_pareto(problem, slack_s=0.0)
    assert found.backward_s == pytest.approx(best_s, rel=EXACT)


def test_without_a_given_slack_the_budget_decides() -> None:
    problem = random_problem(3, most=7)
    best_s = brute_force_s(problem)
    assert solve_pareto(problem).backward_s == pytest.approx(best_s, rel=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_pareto_with_few_groups_is_brute_force_with_few(seed) -> None:
    problem = random_problem(seed, most=5, runs=seed % 3 == 0)
    groups = problem.fewest_groups + seed % 3
    found = solve_pareto(problem, slack_s=0.0, max_groups=groups)
    assert len(found.ends) <= groups
    assert found.backward_s == pytest.approx(brute_force_s(problem, groups), rel=EXACT)


@pytest.mark.parametrize("seed", range(60))
def test_the_papers_bound_on_the_grid_is_never_violated(seed) -> None:
    """Theorem 2: at most (L - 1)/Z above the optimum, and never below it.

    The last group starts on an edge by itself only if it is ready when the work ends,
    as the paper has it; ready before, it is one more that may have to wait for an edge.
    """
    problem = random_problem(seed)
    at_end = replace(problem, ready_s=(*problem.ready_s[:-1], problem.work_s))
    for case, moved in ((at_end, problem.size - 1), (problem, problem.size)):
        best_s = solve_pareto(case, slack_s=0.0).backward_s
        for chunks in (5, 20):
            grid_s = solve_grid(case, chunks=chunks).backward_s
            assert best_s * (1 - EXACT) <= grid_s
            assert grid_s <= best_s * (1 + moved / chunks + EXACT)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("slack", [1e-2, 1e-4])
def test_slack_costs_no_more_than_it_says(seed, slack) -> None:
    problem = random_problem(seed)
    best_s = solve_pareto(problem, slack_s=0.0).backward_s
    found = solve_pareto(problem, slack_s=slack * problem.work_s)
    allowed_s = slack * problem.work_s * problem.size
    assert best_s * (1 - EXACT) <= found.backward_s <= best_s + allowed_s


@pytest.mark.parametrize("seed", range(20))
def test_more_freedom_never_slows(seed) -> None:
    problem = random_problem(seed)
    best_s = solve_pareto(problem, slack_s=0.0).backward_s
    fewer = replace(problem, levels=problem.levels[:-1])
    assert best_s <= solve_pareto(fewer, slack_s=0.0).backward_s * (1 + EXACT)
    one = solve_pareto(problem, slack_s=0.0, max_groups=1).backward_s
    two = solve_pareto(problem, slack_s=0.0, max_groups=2).backward_s
    assert best_s * (1 - EXACT) <= two <= one * (1 + EXACT)


def two_tiny_tensors(startup: str = "mixed") -> LibraProblem:
    return LibraProblem(
        ready_s=(0.0, 1.0),
        total_bytes=(0, 1, 2),
        firsts=(0, 0),
        work_s=2.0,
        startup_s=1.0,
        levels=(Level(resource=1, sigma=0.5, s_per_byte=1e-9, idle_s_per_byte=1e-9),),
        startup=startup,
    )


@pytest.mark.parametrize("startup", STARTUPS)
def test_an_empty_group_makes_the_number_of_groups_a_limit(startup) -> None:
    problem = two_tiny_tensors(startup)
    for found in (
        solve_literal(problem, max_groups=2, chunks=8),
        solve_grid(problem, max_groups=2, chunks=8),
    ):
        assert found.ends == (2,)
        assert found.backward_s == pytest.approx(2.5, rel=1e-6)  # the start-up once


def test_a_chunk_s_edge_is_reached_in_spite_of_rounding() -> None:
    w = 0.9 / 3
    assert 3 * w < 0.9
    assert first_chunk(0.9, w, 3) == 3
    assert first_chunk(0.0, w, 3) == 0
    assert first_chunk(0.31, w, 3) == 2


def test_stage_times_are_eq_19() -> None:
    problem = two_tiny_tensors()
    assert stage_s(problem, 0, 5, 3, 0, 8) == pytest.approx(0.5)
    assert stage_s(problem, 1, 5, 4, 0, 8) == float("inf")
    assert stage_s(problem, 1, 4, 0, 0, 8) == pytest.approx(1.5)
    # Work of .25 s takes .5 s, then half of the message is left.
    assert stage_s(problem, 1, 8, 7, 0, 8) == pytest.approx(1.0)


def contended(make_instance, seed: int):
    workload, cluster = make_instance(seed)
    return workload, replace(cluster, contention=CONTENTION, concurrency=None)


@pytest.mark.parametrize("seed", range(25))
def test_the_simulator_agrees(seed, make_instance) -> None:
    workload, cluster = contended(make_instance, seed)
    plan = planners.get("libra", slack_ratio=0.0).plan(workload, cluster)
    problem, _ = problem_of(workload, cluster)
    assert plan.predicted.backward_s == pytest.approx(
        solve_pareto(problem, slack_s=0.0).backward_s, rel=1e-9
    )
    greedy = planners.get("mg-wfbp").plan(workload, cluster)
    threads = planners.get("libra-m", slack_ratio=0.0).plan(workload, cluster)
    assert [b.tensors for b in threads.buckets] == [b.tensors for b in greedy.buckets]
    best, middle, worst = (p.predicted.iteration_s for p in (plan, threads, greedy))
    assert best <= middle * (1 + EXACT)
    assert middle <= worst * (1 + EXACT)


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_on_one_lane_is_faster(seed, make_instance) -> None:
    """Brute force over fusions and resources by the simulator itself."""
    from stretto.planners.base import Draft, finish

    workload, cluster = contended(make_instance, seed)
    workload = replace(workload, tensors=workload.tensors[:4])
    best_s = min(
        finish(
            replace(Draft.in_turn(ends), resources=resources), "x", workload, cluster
        ).predicted.iteration_s
        for ends in all_fusions(workload)
        for resources in itertools.product(CONTENTION.resources, repeat=len(ends))
    )
    plan = planners.get("libra", slack_ratio=0.0).plan(workload, cluster)
    assert plan.predicted.iteration_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_without_contention_it_is_the_exact_fusion(seed, make_instance) -> None:
    workload, cluster = make_instance(seed)
    fusion = planners.get("fusion").plan(workload, cluster)
    assert planners.get("libra").plan(workload, cluster).buckets == fusion.buckets
    problem, _ = problem_of(workload, cluster)
    assert solve_pareto(problem, slack_s=0.0).backward_s == pytest.approx(
        fusion.predicted.backward_s, rel=1e-9
    )
    greedy = planners.get("mg-wfbp").plan(workload, cluster)
    assert planners.get("libra-m").plan(workload, cluster).buckets == greedy.buckets


@pytest.mark.parametrize("search", ["pareto", "grid", "literal"])
@pytest.mark.parametrize("startup", STARTUPS)
def test_every_search_makes_a_plan(search, startup, make_instance) -> None:
    workload, cluster = contended(make_instance, 3)
    options = {"search": search, "startup": startup, "chunks": 12, "max_groups": 3}
    plan = planners.get("libra", **options).plan(workload, cluster)
    assert len(plan.buckets) <= 3
    for bucket in plan.buckets:
        assert bucket.resource in CONTENTION.resources


def test_levels_can_be_restricted(make_instance) -> None:
    workload, cluster = contended(make_instance, 3)
    plan = planners.get("libra", resources=(2,)).plan(workload, cluster)
    assert {bucket.resource for bucket in plan.buckets} == {2}
    with pytest.raises(SpecError, match=r"1, 2, 4.*got 3"):
        planners.get("libra", resources=(3,)).plan(workload, cluster)


def test_limits_that_cannot_be_met_are_refused(make_workload, make_cluster) -> None:
    workload = make_workload(
        [4000, 4000, 4000], [0.0, 0.1, 0.2], dtypes=["float32", "float16", "float32"]
    )
    cluster = make_cluster(contention=CONTENTION)
    assert len(planners.get("libra", max_groups=3).plan(workload, cluster).buckets) == 3
    with pytest.raises(Infeasible, match=r"at most 2 groups.*make 3 necessary"):
        planners.get("libra", max_groups=2).plan(workload, cluster)
    big = make_workload([4] * 300, [i / 300 for i in range(300)])
    with pytest.raises(Infeasible, match=r"literal.*steps.*grid"):
        planners.get("libra", search="literal").plan(big, cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "guess"}, r"pareto, grid, literal, got 'guess'"),
        ({"startup": "late"}, r"phase, mixed, got 'late'"),
        ({"chunks": 0}, r"libra: chunks must be > 0"),
        ({"max_groups": -1}, r"libra: max_groups must be > 0"),
        ({"slack_ratio": 1.0}, r"slack_ratio must be >= 0 and < 1"),
    ],
)
def test_bad_options_are_refused(options, message, make_instance) -> None:
    with pytest.raises(SpecError, match=message):
        planners.get("libra", **options).plan(*contended(make_instance, 0))


def test_libra_m_refuses_unknown_fusions() -> None:
    with pytest.raises(SpecError, match=r"mg-wfbp, fusion, .*got 'best'"):
        planners.get("libra-m", fusion="best")


def test_many_tensors_are_joined_at_almost_no_loss(make_instance, monkeypatch) -> None:
    monkeypatch.setattr("stretto.planners.libra.MAX_TENSORS", 30)
    for seed in range(6):
        workload, cluster = make_instance(seed, tensors=90, contended=True)
        joined = planners.get("libra").plan(workload, cluster)
        exact = planners.get("libra", slack_ratio=1e-3).plan(workload, cluster)
        names = [name for bucket in joined.buckets for name in bucket.tensors]
        assert names == [tensor.name for tensor in workload.tensors]
        ratio = joined.predicted.iteration_s / exact.predicted.iteration_s
        assert ratio < 1.01, seed
