"""Plans for graphs whose branches cross."""

from __future__ import annotations

import itertools
import random

import pytest

from stretto.planners.burst import crossing
from stretto.planners.burst.cuts import collapsed, expanded, joined
from stretto.planners.burst.evaluate import evaluate, in_turns
from stretto.planners.burst.plan import (
    plan,
    plans_of_front,
    same_width,
    same_width_times,
)
from stretto.planners.burst.problem import BurstProblem, Choice
from stretto.schema.burst import Layer, LayerProfile
from support.burst_graphs import (
    chain_of,
    inputs_of,
    random_network,
    random_profile,
    random_shape,
)

CROSS = {"b": "a", "c": "a", "d": "b c", "e": "c", "f": "d e"}


def crossing_profile(rng, batch, *, before=1, after=1) -> LayerProfile:
    """A chain, a part that crosses, a chain."""
    some = random_profile(rng, chain_of(before + 5 + after), batch).layers
    names = [f"p{i}" for i in range(before - 1)] + list("abcdef")
    names += [f"q{i}" for i in range(after)]
    reads = {name: tuple(inputs.split()) for name, inputs in CROSS.items()}
    layers = []
    for i, (name, layer) in enumerate(zip(names, some, strict=True)):
        inputs = reads.get(name, (names[i - 1],) if i else ())
        layers.append(
            Layer(
                name=name,
                inputs=inputs,
                parameter_bytes=layer.parameter_bytes,
                activation_bytes=layer.activation_bytes,
                times=layer.times,
            )
        )
    return LayerProfile(name="crossing", device="none", layers=tuple(layers))


def problem_of(rng, profile, *, limit=None, gpus=4, batch=4):
    return BurstProblem.of(
        profile,
        random_network(rng),
        gpus=gpus,
        batch=batch,
        amplification_limit=limit,
    )


def oracle_s(problem):
    """The least sum over all widths, straight from the words of the model."""
    layers, widths = problem.profile.layers, problem.widths
    at = {layer.name: i for i, layer in enumerate(layers)}
    best = float("inf")
    for of in itertools.product(widths, repeat=len(layers)):
        total, worst = 0.0, 0.0
        for layer, g in zip(layers, of, strict=True):
            own = layer.compute_s(-(-problem.batch // g))
            own += problem.network.sync_s(layer.parameter_bytes, g)
            comms = []
            for name in layer.inputs:
                h, source = of[at[name]], layers[at[name]]
                moved = abs(-(-problem.batch // h) - -(-problem.batch // g))
                link = problem.network.transfer
                each = 2 * source.activation_bytes / link.bandwidth_bytes_per_s
                comms.append(0.0 if g == h else each * moved + 2 * link.latency_s)
            total += own + sum(comms)
            single = layer.compute_s(problem.batch)
            worst = max(worst, *((own + c) * g / single for c in comms or [0.0]))
        limit = problem.amplification_limit
        if limit is None or worst <= limit * (1 + 1e-9):
            best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_small_crossing_graphs_are_as_fast_as_the_best_of_all_choices(seed):
    rng = random.Random(seed)
    problem = problem_of(rng, crossing_profile(rng, 4), limit=[None, 1.5][seed % 2])
    assert problem.crosses
    found = plan(problem)
    assert found.predicted.iteration_s == pytest.approx(oracle_s(problem), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_larger_ones_are_never_slower_than_with_what_crosses_as_one_layer(
    seed, monkeypatch
):
    monkeypatch.setattr(crossing, "MAX_TRIED", 10)
    rng = random.Random(seed)
    problem = problem_of(rng, crossing_profile(rng, 4), limit=[None, 1.5][seed % 2])
    whole, groups = joined(problem.profile)
    assert [layer.name for layer in whole.layers] == ["a", "b+c+d+e+f", "q0"]
    assert groups == [[0], [1, 2, 3, 4, 5], [6]]
    found = plan(problem).predicted
    assert found.iteration_s <= found.single_width_s * (1 + 1e-12)
    assert found.iteration_s >= oracle_s(problem) * (1 - 1e-12)
    if problem.amplification_limit:
        assert found.max_amplification <= 1.5 * (1 + 1e-9)
    for each in plans_of_front(problem):
        assert each.predicted.iteration_s >= found.iteration_s * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_sum_in_turns_is_the_walks_where_no_branch_has_gpus_of_its_own(seed):
    rng = random.Random(seed)
    shape = random_shape(rng, 2)
    profile = random_profile(rng, shape, 8)
    problem = problem_of(rng, profile, gpus=8, batch=8)
    assert not problem.crosses
    choice = Choice(widths=tuple(rng.randrange(4) for _ in inputs_of(shape)))
    one, two = in_turns(problem, choice), evaluate(problem, choice)
    assert one.iteration_s == pytest.approx(two.iteration_s, rel=1e-12)
    assert one.gpu_s == pytest.approx(two.gpu_s, rel=1e-12)
    assert one.max_amplification == pytest.approx(two.max_amplification, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_with_one_width_for_all_nothing_moves(seed):
    rng = random.Random(seed)
    profile = random_profile(rng, random_shape(rng, 2, nested=True), 8)
    problem = problem_of(rng, profile, gpus=8, batch=8)
    for gpus, time_s in same_width_times(problem).items():
        cost = evaluate(
            problem, Choice(widths=(problem.widths.index(gpus),) * len(profile.layers))
        )
        assert time_s == pytest.approx(cost.iteration_s, rel=1e-12)
        assert same_width(problem, gpus).predicted.iteration_s == cost.iteration_s


def test_what_does_not_cross_stays_apart():
    rng = random.Random(0)
    profile = random_profile(rng, random_shape(rng, 2), 4)
    whole, groups = joined(profile)
    assert whole.layers == profile.layers
    assert all(len(group) == 1 for group in groups)


def test_a_choice_for_joined_layers_goes_there_and_back():
    groups = [[0], [1, 2, 3], [4]]
    choice = Choice(widths=(2, 0, 1), own=frozenset({1}), first_gpus=(0, 3, 0))
    there = expanded(choice, groups)
    assert there == Choice(
        widths=(2, 0, 0, 0, 1), own=frozenset({1}), first_gpus=(0, 3, 3, 3, 0)
    )
    assert collapsed(there, groups) == choice
