"""Windows of predicted steps, and learned ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto._api import burst
from stretto.background.windows import (
    KNOWN_AFTER,
    Window,
    WindowLearner,
    usable_s,
    windows_by_rank,
    windows_of,
)
from stretto.errors import SpecError
from stretto.schema import Span, Timeline
from stretto.zoo import cluster, layer_profile


def timeline(*rows):
    return Timeline(
        name="step",
        spans=tuple(
            Span(track=track, name=name, start_s=start_s, end_s=end_s)
            for track, name, start_s, end_s in rows
        ),
    )


def rows_of(windows):
    return [(w.begin_s, pytest.approx(w.length_s), w.kind) for w in windows]


def test_windows_are_the_gaps_between_what_a_rank_computes():
    step = timeline(
        ("rank0", "a", 1.0, 2.0),
        ("rank0", "b", 2.0, 3.0),
        ("rank0", "c", 5.0, 6.0),
        ("rank1", "a", 0.0, 10.0),
        ("rank0 network", "a to b", 0.2, 0.9),
        ("rank0 network", "gradient of b", 3.0, 3.5),
        ("rank0 network", "gradients to a", 6.0, 9.0),
    )
    assert rows_of(windows_of(step, 0)) == [
        (0.0, 1.0, "redistribution"),
        (3.0, 2.0, "redistribution"),
        (6.0, 4.0, "synchronization"),
    ]
    assert windows_of(step, 1) == ()


def test_short_windows_may_be_left_out():
    step = timeline(("rank0", "a", 1.0, 2.0), ("rank0", "b", 5.0, 6.0))
    assert rows_of(windows_of(step, 0, min_s=1.5)) == [(2.0, 3.0, "redistribution")]


def test_a_rank_without_layers_is_idle_for_the_whole_step():
    step = timeline(
        ("rank0", "a", 0.0, 4.0), ("rank1 network", "gradients to a", 2.0, 4.0)
    )
    assert rows_of(windows_of(step, 1)) == [(0.0, 4.0, "synchronization")]


def test_a_rank_that_the_timeline_does_not_have_is_refused():
    with pytest.raises(SpecError, match="no track of rank 3; it has rank0"):
        windows_of(timeline(("rank0", "a", 0.0, 1.0)), 3)


@pytest.fixture(scope="module")
def burst_step():
    profile = layer_profile("vgg16", samples=tuple(2**i for i in range(6)))
    network = cluster("deeppool")
    plan = burst.plan_layers(
        profile, gpus=8, batch=32, cluster=network, amplification_limit=2.0
    )
    return burst.simulate(profile, plan, network)


def test_windows_of_a_simulated_step_add_up_to_the_idle_time(burst_step):
    for rank, idle_s in enumerate(burst_step.idle_s):
        windows = windows_of(burst_step.timeline, rank)
        assert sum(w.length_s for w in windows) == pytest.approx(idle_s)


@given(st.lists(st.floats(0.0, 50.0), max_size=6), st.floats(0.1, 20.0))
def test_usable_time_is_whole_tasks_of_each_window(lengths, b):
    windows = [Window(begin_s=0.0, length_s=w, kind="a") for w in lengths]
    used = usable_s(windows, b)
    assert 0.0 <= used <= sum(lengths) + 1e-9
    assert used + b * len(lengths) >= sum(lengths) - 1e-9
    assert used / b == pytest.approx(round(used / b))


def test_tasks_without_a_length_have_no_usable_time():
    with pytest.raises(SpecError, match="task_s"):
        usable_s([], 0.0)


def waits(*rows):
    return [Window(begin_s=b, length_s=s, kind=k) for b, s, k in rows]


def expected_s(learner, position, kind):
    found = learner.expected(position, kind)
    return None if found is None else found.usual_s


def test_a_window_is_known_after_some_steps():
    learner = WindowLearner()
    for step in range(KNOWN_AFTER):
        assert expected_s(learner, 0, "a") is None, step
        learner.add(waits((1.0, 2.0, "a"), (4.0, 1.0, "b")))
    assert expected_s(learner, 0, "a") == pytest.approx(2.0)
    assert expected_s(learner, 1, "b") == pytest.approx(1.0)
    assert expected_s(learner, 1, "a") is None
    assert expected_s(learner, 2, "a") is None
    assert rows_of(learner.windows) == [(1.0, 2.0, "a"), (4.0, 1.0, "b")]


def test_learned_windows_follow_a_change_and_forget_the_first_steps():
    learner = WindowLearner()
    for _ in range(5):
        learner.add(waits((1.0, 8.0, "a")))
    for _ in range(15):
        learner.add(waits((1.0, 2.0, "a")))
    assert expected_s(learner, 0, "a") == pytest.approx(2.0, rel=0.05)


def test_a_step_with_other_waits_starts_the_changed_part_again():
    learner = WindowLearner()
    for _ in range(KNOWN_AFTER):
        learner.add(waits((1.0, 2.0, "a"), (4.0, 1.0, "b"), (6.0, 1.0, "c")))
    learner.add(waits((1.0, 2.0, "a"), (4.0, 1.0, "c")))
    assert expected_s(learner, 0, "a") == pytest.approx(2.0)
    assert expected_s(learner, 1, "b") is None
    assert expected_s(learner, 1, "c") is None
    assert expected_s(learner, 2, "c") is None


def test_a_wait_that_varies_is_expected_to_be_as_short_as_one_in_four():
    learner = WindowLearner()
    for length_s in (5.0, 1.0, 4.0, 2.0, 9.0, 3.0, 8.0, 7.0):
        learner.add(waits((0.0, length_s, "a"), (20.0, 6.0, "b")))
    found = learner.expected(0, "a")
    assert found.usual_s == pytest.approx(4.5)
    assert sum(length_s < found.short_s for length_s in (1, 2, 3, 4)) == 2
    assert learner.longest_s == pytest.approx(6.0)
    assert (learner.expected(1, "b").longer, found.longer) == (1, 2)


def test_windows_of_all_ranks_are_those_of_each(burst_step):
    ranks = range(len(burst_step.idle_s))
    each = tuple(windows_of(burst_step.timeline, rank) for rank in ranks)
    assert windows_by_rank(burst_step.timeline, ranks) == each
