"""The published A100 profile of VGG-16 gives the published times."""

from __future__ import annotations

import pytest

from stretto.cost.burst import DEEPPOOL
from stretto.papers.deeppool_literal import search_linear
from stretto.planners.burst.evaluate import evaluate
from stretto.planners.burst.problem import BurstProblem, Choice
from stretto.planners.burst.search import shortest
from support import published_vgg16

PUBLISHED_DP_S = 13.57e-3
"""DeepPool Figure 9a: 32 samples on 8 GPUs, every layer on all, measured."""


@pytest.fixture(scope="module")
def vgg16():
    return published_vgg16.vgg16()


def problem_of(profile, limit=None):
    return BurstProblem.of(
        profile, DEEPPOOL, gpus=8, batch=32, amplification_limit=limit
    )


def test_the_profile_is_vgg16(vgg16):
    assert vgg16.parameter_bytes == 4 * 138_357_544
    assert [layer.name.partition(".")[2] for layer in vgg16.layers[-4:]] == [
        "flatten",
        "linear",
        "linear",
        "linear",
    ]


def test_data_parallel_is_predicted_within_ten_percent(vgg16):
    problem = problem_of(vgg16)
    everywhere = Choice(widths=(3,) * len(vgg16.layers))
    found_s = evaluate(problem, everywhere).iteration_s
    assert found_s == pytest.approx(PUBLISHED_DP_S, rel=0.10)
    assert found_s == pytest.approx(14.58e-3, rel=1e-3)


def test_bursting_within_five_times_is_a_fifth_faster(vgg16):
    problem = problem_of(vgg16, 5.0)
    everywhere = Choice(widths=(3,) * len(vgg16.layers))
    burst_s, choice = shortest(problem)
    assert evaluate(problem, everywhere).iteration_s / burst_s > 1.2
    assert evaluate(problem, choice).max_amplification <= 5.0
    gpus = [problem.widths[at] for at in choice.widths]
    assert gpus[:10] == [8] * 10
    assert gpus[-3:] == [1] * 3  # the large linear layers hardly scale


def test_algorithm_1_as_printed_passes_a_limit_of_three(vgg16):
    problem = problem_of(vgg16, 3.0)
    sync = [
        [DEEPPOOL.sync_s(layer.parameter_bytes, g) for g in problem.widths]
        for layer in vgg16.layers
    ]
    comp = [
        [own - s for own, s in zip(row, syncs, strict=True)]
        for row, syncs in zip(problem.node_s.tolist(), sync, strict=True)
    ]

    def comm_s(layer, before, after):
        return problem.comm_s(layer - 1, before, after, moved=False)

    _, widths = search_linear(comp, sync, comm_s, problem.widths, 3.0)
    assert evaluate(problem, Choice(widths=widths)).max_amplification > 3.5
    _, exact = shortest(problem)
    assert evaluate(problem, exact).max_amplification <= 3.0


def test_a_batch_beyond_the_profile_is_refused(vgg16):
    with pytest.raises(ValueError, match="was profiled for 1 to 64 samples"):
        shortest(BurstProblem.of(vgg16, DEEPPOOL, gpus=8, batch=128))
