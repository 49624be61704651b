from __future__ import annotations

import csv
import itertools
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cost.piecewise import PiecewiseTime, Segment, fit_piecewise
from stretto.errors import Infeasible, SpecError
from stretto.schema import CollectiveSample

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "vtrain"


def samples(pairs, *, ranks=8, spread_s=0.0):
    return [
        CollectiveSample(
            size_bytes=size,
            lanes=1,
            ranks=ranks,
            duration_s=time_s,
            spread_s=spread_s,
            repetitions=1,
        )
        for size, time_s in pairs
    ]


SIZES = [2**e for e in range(8, 27)]


def two_lines(size):
    """An eager protocol below 64 KiB, another from there on."""
    return 2e-5 + 2e-9 * size if size < 2**16 else 9e-5 + 5e-10 * size


def test_a_line_is_recovered_and_takes_one_segment():
    fit = fit_piecewise(samples((m, 3e-5 + 1e-9 * m) for m in SIZES))
    (segment,) = fit.value.segments
    assert segment.startup_s == pytest.approx(3e-5, rel=1e-6)
    assert segment.s_per_byte == pytest.approx(1e-9, rel=1e-6)
    assert fit.mean_error_ratio < 1e-6
    assert fit.value.linear().ranks == 8


def test_two_lines_are_recovered_with_where_they_meet():
    fit = fit_piecewise(samples((m, two_lines(m)) for m in SIZES))
    assert [s.from_bytes for s in fit.value.segments] == [0, 2**16]
    assert fit.value.segments[0].s_per_byte == pytest.approx(2e-9, rel=1e-6)
    line = fit.value.linear()
    assert line.startup_s == pytest.approx(9e-5, rel=1e-6)
    assert line.s_per_byte == pytest.approx(5e-10, rel=1e-6)
    for m in SIZES:
        assert fit.value.time_s(m) == pytest.approx(two_lines(m), rel=1e-6)


def test_noise_does_not_ask_for_segments_and_shows_as_uncertainty():
    rng = random.Random(1)
    noisy = [(m, (3e-5 + 1e-9 * m) * (1 + rng.gauss(0, 0.02))) for m in SIZES * 3]
    fit = fit_piecewise(samples(noisy))
    assert len(fit.value.segments) == 1
    line = fit.value.linear()
    for name, truth in (("startup_s", 3e-5), ("s_per_byte", 1e-9)):
        error = fit.std_errors[name]
        assert 0 < error < 0.05 * truth
        assert abs(getattr(line, name) - truth) < 4 * error


def test_lines_over_nine_decades_are_exact():
    def truth(m):
        return 5e-6 + 1e-9 * m if m < 2**13 else 3e-5 + 1e-10 * m

    sizes = [2**e for e in range(2, 31)]
    fit = fit_piecewise(samples((m, truth(m)) for m in sizes))
    assert [s.from_bytes for s in fit.value.segments] == [0, 2**13]
    assert fit.worst_error_ratio < 1e-9
    assert fit.value.linear().s_per_byte == pytest.approx(1e-10, rel=1e-9)


def exhaustive(pairs, most):
    """The least misfit over all partitions into up to ``most`` runs of three."""
    import numpy as np

    def misfit(part):
        rows = np.array([(1 / t, m / t) for m, t in part])
        scale = np.linalg.norm(rows, axis=0)
        x, *_ = np.linalg.lstsq(rows / scale, np.ones(len(part)), rcond=None)
        return float(np.sum((rows / scale @ x - 1) ** 2))

    count = len(pairs)
    best = {}
    for number in range(1, most + 1):
        for cuts in itertools.combinations(range(1, count), number - 1):
            edges = [0, *cuts, count]
            if all(b - a >= 3 for a, b in itertools.pairwise(edges)):
                total = sum(misfit(pairs[a:b]) for a, b in itertools.pairwise(edges))
                best[number] = min(best.get(number, math.inf), total)
    return best


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_lines_and_their_beginnings_are_the_best_of_all(seed):
    rng = random.Random(seed)
    pairs = [(m, two_lines(m) * (1 + rng.uniform(-0.03, 0.03))) for m in SIZES[4:16]]
    fit = fit_piecewise(samples(pairs))
    number = len(fit.value.segments)
    misfit = sum(r * r for r in fit.residual_ratios)
    assert misfit == pytest.approx(exhaustive(pairs, 3)[number], rel=1e-6)


@pytest.mark.parametrize("gpus", [2, 8])
def test_published_times_are_met_within_two_per_cent(gpus):
    path = PUBLISHED / f"a100_allreduce_{gpus}gpu.txt"
    if not path.exists():
        pytest.skip(f"{path.name} of the vTrain artifact is not here")
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    fit = fit_piecewise(
        samples([(int(r[0]), float(r[3]) * 1e-9) for r in rows], ranks=gpus)
    )
    assert fit.mean_error_ratio < 0.02
    line = fit.value.linear()
    # algorithms.md section 4: 193 and 130 GB/s.
    assert 1e-9 / line.s_per_byte == pytest.approx({2: 193, 8: 130}[gpus], rel=0.1)


def test_more_bytes_in_less_time_are_refused():
    pairs = [(m, 3e-5 + 1e-9 * m) for m in SIZES]
    pairs[-1] = (SIZES[-1], pairs[-2][1] * 0.7)
    with pytest.raises(Infeasible, match="more bytes cannot take less time"):
        fit_piecewise(samples(pairs))
    # Unless the measurement itself says that it is that unsteady.
    fit_piecewise(samples(pairs, spread_s=0.02))


def test_times_that_never_grow_are_refused():
    with pytest.raises(Infeasible, match="do not grow with the size"):
        fit_piecewise(samples((m, 1e-3) for m in SIZES))


def test_bad_samples_are_named():
    with pytest.raises(SpecError, match="two sizes at least, got 1"):
        fit_piecewise(samples([(8, 1.0), (8, 1.1)]))
    mixed = samples([(8, 1.0)]) + samples([(16, 1.1)], ranks=4)
    with pytest.raises(SpecError, match="8 ranks, got one of 1 lanes and 4 ranks"):
        fit_piecewise(mixed)
    with pytest.raises(SpecError, match="max_segments must be >= 1, got 0"):
        fit_piecewise(samples([(8, 1.0), (16, 1.1)]), max_segments=0)


def test_two_samples_give_a_line_of_unknown_accuracy():
    fit = fit_piecewise(samples([(1000, 2.0), (2000, 3.0)]))
    assert fit.value == PiecewiseTime(
        segments=(
            Segment(
                from_bytes=0,
                startup_s=pytest.approx(1.0),
                s_per_byte=pytest.approx(1e-3),
            ),
        ),
        ranks=8,
    )
    assert all(math.isinf(error) for error in fit.std_errors.values())
