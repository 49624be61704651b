"""Burst plans beside a background: fronts, partitions and the command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from stretto._api import burst
from stretto.cli.burst import command
from stretto.errors import SpecError
from stretto.planners.burst import collocated
from stretto.schema import Collocation
from stretto.sim.collocation import CollocatedStep
from stretto.zoo import cluster, layer_profile
from support.pairs import measured_pair

PAIR = measured_pair(
    foreground="vgg16",
    background="ResNet-50",
    policy="fits",
    loss_spread_ratio=0.01,
    share_spread_ratio=0.05,
    pairs=12,
)


@pytest.fixture(scope="module")
def problem():
    profile = layer_profile("vgg16", samples=tuple(2**i for i in range(6)))
    return burst.problem(profile, gpus=8, batch=32, cluster=cluster("deeppool"))


@pytest.fixture(scope="module")
def network():
    return cluster("deeppool")


@pytest.fixture(scope="module")
def plans(problem, network):
    return collocated.plans_over_limits(problem, network)


def test_plans_over_limits_keep_their_limits_and_differ(problem, network, plans):
    assert len({one.plan.layers for one in plans}) == len(plans) > 2
    for one in plans:
        assert one.plan.amplification_limit == one.limit
        again = burst.simulate(problem.profile, one.plan, network)
        assert one.step.iteration_s == again.iteration_s
    limited = replace(problem, amplification_limit=1.5)
    assert all(
        one.limit is not None and one.limit <= 1.5
        for one in collocated.plans_over_limits(limited, network)
    )


def test_rates_are_over_those_of_each_job_alone(problem, network, plans):
    alone_s = collocated.alone_s(problem, network)
    assert alone_s == plans[-1].step.iteration_s
    for one, found in zip(plans, collocated.beside(plans, PAIR, alone_s), strict=True):
        assert found.alone_s == one.step.iteration_s
        assert found.foreground == pytest.approx(alone_s / found.step.iteration_s)
        busy = [
            sum(w.length_s // PAIR.task_s * PAIR.task_s for w in windows)
            for windows in one.step.windows
        ]
        step_s = one.step.iteration_s
        rates = [
            1.0 if idle_s > step_s - 1e-12 else 0.4 / 0.5 * b / step_s
            for b, idle_s in zip(busy, one.step.idle_s, strict=True)
        ]
        assert found.step.background == pytest.approx(sum(rates) / 8, rel=1e-6)
        assert found.total == found.foreground + found.step.background


def test_no_plan_is_faster_than_the_step_to_which_rates_are_relative(problem, network):
    free_s = collocated.alone_s(problem, network)
    for ratio in (0.9, 1.1):
        step = SimpleNamespace(iteration_s=ratio * free_s)
        found = collocated.alone_s(problem, network, [SimpleNamespace(step=step)])
        assert found == min(ratio, 1.0) * free_s


@given(
    st.lists(
        st.tuples(st.floats(0.1, 2.0), st.floats(0.0, 1.0)), min_size=1, max_size=12
    )
)
def test_a_front_has_what_nothing_beats(points):
    made = [
        collocated.CollocatedPlan(
            limit=None,
            plan=None,
            alone_s=1.0,
            step=CollocatedStep(iteration_s=time_s, background_by_rank=(rate,)),
            foreground=1.0 / time_s,
        )
        for time_s, rate in points
    ]
    front = collocated.front_of(made)
    at = [(one.step.iteration_s, one.step.background) for one in front]
    assert at == sorted(at)
    for time_s, rate in points:
        assert any(t <= time_s and r >= rate - 1e-9 for t, r in at)
    for time_s, rate in at:
        assert not any(t < time_s and r > rate + 1e-9 for t, r in points)


def test_partitions_give_the_other_ranks_to_backgrounds(problem, network):
    found = collocated.partitions(problem, network, 1.0)
    assert [part.gpus for part in found] == list(problem.widths)
    for part in found:
        assert part.background == (8 - part.gpus) / 8
        assert part.foreground == pytest.approx(1.0 / part.iteration_s)
        assert part.total == part.foreground + part.background


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "always"}, "policy"),
        ({"usable_ratio": 1.5}, "usable_ratio must be <= 1"),
        ({"usable_ratio": 0.0}, "usable_ratio"),
        ({"task_s": -1.0}, "task_s"),
        ({"loss_ratio": -1.0}, "loss_ratio"),
        ({"pairs": 0}, "pairs"),
        ({"depth": 0}, "depth"),
        ({"background": ""}, "background"),
        ({"share_ratio": float("nan")}, "share_ratio"),
        ({"background": "a\x1b[31m"}, "no control characters"),
    ],
)
def test_impossible_pairs_are_refused(change, words):
    with pytest.raises(SpecError, match=words):
        replace(PAIR, **change)


def test_files_keep_each_pair_once(tmp_path):
    path = tmp_path / "pairs.json"
    found = Collocation(rows=(PAIR,)).with_row(replace(PAIR, loss_ratio=0.5))
    found = found.with_row(replace(PAIR, depth=2))
    assert [row.loss_ratio for row in found.rows] == [0.5, 0.03]
    found.save(path)
    assert Collocation.load(path) == found
    with pytest.raises(SpecError, match="again"):
        Collocation(rows=(PAIR, PAIR))
    with pytest.raises(SpecError, match="empty"):
        Collocation(rows=())
    path.write_text(path.read_text().replace('"fits"', '"sometimes"'))
    with pytest.raises(SpecError, match=r"pairs\.json: \$\.rows\[0\]\.policy"):
        Collocation.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"loss_ratio": -0.02, "share_ratio": 1.05}, None),
        ({"share_ratio": 1.3}, "1.30 times as fast beside"),
        ({"loss_spread_ratio": 0.6}, "60 points apart"),
    ],
)
def test_a_pair_of_a_disturbed_run_is_doubted(change, words):
    doubt = replace(PAIR, **change).doubt
    assert doubt is None if words is None else words in doubt


@pytest.fixture
def files(tmp_path, problem, network):
    problem.profile.save(tmp_path / "vgg.json")
    network.save(tmp_path / "cluster.json")
    Collocation(rows=(replace(PAIR, foreground=problem.profile.name),)).save(
        tmp_path / "pairs.json"
    )
    Collocation(rows=(replace(PAIR, foreground="else"),)).save(tmp_path / "else.json")
    return tmp_path


def planned(files, *more, pairs="pairs.json", gpus=8):
    words = ["plan", str(files / "vgg.json"), "--gpus", str(gpus), "--batch", "32"]
    words += ["--collocation", str(files / pairs), *more]
    if "--no-cluster" in words:
        words.remove("--no-cluster")
    else:
        words += ["--cluster", str(files / "cluster.json")]
    return CliRunner().invoke(command, words)


def test_a_plan_is_shown_with_its_background(files):
    found = json.loads(planned(files, "--json").stdout)
    (row,) = found["beside"]
    assert row["iteration_s"] == pytest.approx(1.03 * row["alone_s"])
    assert row["total"] == row["foreground_rate"] + row["background_rate"]
    assert len(row["background_by_rank"]) == len(row["windows_by_rank"]) == 8
    text = planned(files).stdout
    assert "ResNet-50 beside" in text
    assert "of each job's rate alone" in text


def test_a_front_has_text_json_and_a_page(files):
    page = files / "front.html"
    done = planned(files, "--front", "--report", str(page))
    assert done.exit_code == 0, done.output
    assert "static partition" in done.stdout
    assert "<svg" in page.read_text()
    found = json.loads(planned(files, "--front", "--json").stdout)
    (pair,) = found["pairs"]
    steps = [row["iteration_s"] for row in pair["front"]]
    assert steps == sorted(steps)
    assert [row["gpus"] for row in found["partitions"]] == [1, 2, 4, 8]


def test_pairs_of_the_same_jobs_keep_their_own_figures(files):
    own = replace(PAIR, foreground="vgg16")
    other = replace(own, policy="outstanding", depth=4, loss_ratio=0.3)
    page = files / "front.html"
    for row in (own, other):
        Collocation(rows=(row,)).save(files / f"{row.policy}.json")
    Collocation(rows=(own, other)).save(files / "both.json")
    both = json.loads(planned(files, "--front", "--json", pairs="both.json").stdout)
    for row, found in zip((own, other), both["pairs"], strict=True):
        done = planned(files, "--front", "--json", pairs=f"{row.policy}.json")
        assert [found] == json.loads(done.stdout)["pairs"]
        assert found["measured"] == asdict(row)
    text = planned(files, "--front", "--report", str(page), pairs="both.json").stdout
    assert "loss 30.0% (quartiles 1.0 points apart)" in text
    assert [
        name in page.read_text()
        for name in (">ResNet-50, fits, depth 1<", ">ResNet-50, outstanding, depth 4<")
    ] == [True, True]


def test_one_gpu_has_a_front_too(files):
    done = planned(files, "--front", "--report", str(files / "x.html"), gpus=1)
    assert done.exit_code == 0, done.output
    assert "on 1 GPU." in done.stdout


@pytest.mark.parametrize(
    ("more", "pairs", "words"),
    [
        (["--no-cluster"], "pairs.json", "--collocation needs --cluster"),
        (["--report", "x.html"], "pairs.json", "--report needs --front and"),
        ([], "missing.json", "missing.json"),
        ([], "vgg.json", "must be 'collocation'"),
    ],
)
def test_wrong_use_is_one_error(files, more, pairs, words):
    done = planned(files, *more, pairs=pairs)
    assert done.exit_code != 0
    assert words in done.output + str(done.exception or "")


def test_pairs_of_another_foreground_are_used_with_a_warning(files):
    done = planned(files, pairs="else.json")
    assert done.exit_code == 0
    assert "has no pair with the foreground" in done.output
    assert "those of else" in done.output


def test_doubtful_pairs_are_used_with_a_warning(files):
    doubtful = replace(PAIR, foreground="vgg16", loss_spread_ratio=0.6)
    Collocation(rows=(doubtful,)).save(files / "doubtful.json")
    done = planned(files, pairs="doubtful.json")
    assert done.exit_code == 0
    assert "60 points apart, so other work disturbed the run" in done.output
    assert "disturbed" not in planned(files).output


def test_tasks_that_no_window_fits_are_named(files):
    long = replace(PAIR, foreground="vgg16", task_s=10.0)
    Collocation(rows=(long,)).save(files / "long.json")
    text = planned(files, pairs="long.json").stdout
    assert "no window of this plan fits a task of 10" in text
    assert "no window" not in planned(files).stdout
    outstanding = replace(long, policy="outstanding")
    Collocation(rows=(outstanding,)).save(files / "long.json")
    assert "no window" not in planned(files, pairs="long.json").stdout
