"""The commands plan, compare and simulate, as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from stretto import _api, planners
from stretto._api import planning
from stretto.cli._main import group
from stretto.errors import StrettoError
from stretto.planners.joint import DIMS
from stretto.schema import Cluster, Link, Plan, TensorSpec, Timeline, Workload
from stretto.units import format_s

PLAN_KEYS = {
    "planner",
    "iteration_s",
    "backward_s",
    "exposed_communication_s",
    "lower_bound_s",
    "gap",
    "bound_scope",
    "lanes",
    "buckets",
    "search_s",
    "warnings",
}


def a_workload(name: str = "model", tensors: int = 12) -> Workload:
    return Workload(
        name=name,
        framework="pytorch",
        device="cpu",
        batch_per_rank=8,
        forward_s=0.02,
        backward_s=0.1,
        tensors=tuple(
            TensorSpec(
                name=f"{name}.{i}",
                bytes=1_200_000 if i % 2 else 400,
                dtype="float32",
                ready_s=0.008 * i,
                needed_s=0.0,
            )
            for i in range(tensors)
        ),
    )


A_CLUSTER = Cluster(
    name="lab",
    hosts=4,
    ranks_per_host=1,
    inter_host=Link(
        latency_s=1.5e-4, bandwidth_bytes_per_s=117e6, stream_bytes_per_s=36e6
    ),
    intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=1e10),
)


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    a_workload().save(tmp_path / "workload.json")
    A_CLUSTER.save(tmp_path / "cluster.json")
    return str(tmp_path / "workload.json"), str(tmp_path / "cluster.json")


def call(*args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, with errors as `main` turns them into codes."""
    result = CliRunner().invoke(group, [str(a) for a in args])
    if isinstance(result.exception, StrettoError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def test_plan_prints_the_agreed_keys_and_writes_the_plan(files, tmp_path) -> None:
    target = tmp_path / "plan.json"
    code, out, err = call("plan", *files, "-o", target, "--json")
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert set(row) == PLAN_KEYS
    plan = Plan.load(target)
    plan.check_matches(a_workload())
    assert plan.planner == row["planner"] == "joint"
    assert len(plan.buckets) == row["buckets"]
    assert plan.predicted.iteration_s == row["iteration_s"]
    assert row["search_s"] > 0


def test_the_time_of_a_search_has_no_proof_of_the_bound(files, monkeypatch) -> None:
    calls = []

    def clock():
        calls.append("clock")
        return 0.5 * len(calls)

    def certified(plan, *_):
        calls.append("proof")
        return plan

    monkeypatch.setattr(planning, "perf_counter", clock)
    monkeypatch.setattr(planning, "certified", certified)
    rows = json.loads(call("compare", *files, "--json")[1])
    assert {row["search_s"] for row in rows} == {0.5}
    assert calls == ["clock", "clock", "proof"] * len(rows)


def test_plan_prints_a_table_of_its_buckets(files) -> None:
    code, out, err = call("plan", *files, "--planner", "wfbp")
    assert (code, err) == (0, "")
    for i in range(12):
        assert f"model.{i}" in out
    assert "no plan with ring all-reduces overlapped with backward" in out


@pytest.mark.parametrize(
    ("planner", "options", "made_by"),
    [
        ("ddp", ["--cap", "2MiB", "--first-cap", "4KiB"], ("cap_bytes", 2**21)),
        ("aiacc", ["--unit", "1MiB", "--lanes", "3"], ("lanes", 3)),
        ("horovod", ["--cycle-ms", "20", "--fusion-buffer", "2MB"], ("cycle_s", 0.02)),
        ("joint", ["--max-lanes", "2"], ("max_lanes", 2)),
        (
            "libra",
            ["--groups", "3", "--search", "grid", "--chunks", "8", "--startup=mixed"],
            ("max_groups", 3),
        ),
        ("asc-wfbp", ["--literal"], ("literal", True)),
    ],
)
def test_planner_options_reach_the_planner(
    planner, options, made_by, files, tmp_path
) -> None:
    target = tmp_path / "plan.json"
    assert call("plan", *files, "--planner", planner, *options, "-o", target)[0] == 0
    known = {
        "ddp": {"first_cap_bytes": 4096},
        "aiacc": {"unit_bytes": 2**20},
        "horovod": {"fusion_bytes": 2_000_000},
        "libra": {"search": "grid", "chunks": 8, "startup": "mixed"},
    }.get(planner, {})
    expected = dict([made_by]) | known
    assert Plan.load(target) == _api.plan(a_workload(), A_CLUSTER, planner, **expected)
    default = planners.get(planner).plan(a_workload(), A_CLUSTER)
    assert Plan.load(target) != default


def test_wrong_input_exits_with_2_and_writes_nothing(files, tmp_path) -> None:
    workload, cluster = files
    target = tmp_path / "plan.json"
    code, out, err = call("plan", workload, workload, "-o", target)
    assert (code, out) == (2, "")
    assert workload in err
    code, _, err = call("plan", workload, cluster, "--planner", "best", "-o", target)
    assert code == 2
    assert "'best'" in err
    code, _, err = call("plan", workload, cluster, "--cap", "1MiB", "-o", target)
    assert code == 2
    assert "joint has no option" in err
    code, _, err = call("plan", workload, cluster, "--cap", "big", "-o", target)
    assert code == 2
    assert "'big'" in err
    assert call("plan", workload, tmp_path / "none.json", "-o", target)[0] == 2
    assert not target.exists()


def test_no_feasible_plan_exits_with_3(files) -> None:
    code, _, err = call("plan", *files, "--planner", "exhaustive")
    assert code == 3
    assert "at most 8 tensors" in err


def test_a_search_that_would_not_end_is_refused_at_once(files, tmp_path) -> None:
    workload = tmp_path / "six.json"
    a_workload(tensors=6).save(workload)
    options = ("--planner", "exhaustive", "--max-lanes", "6")
    code, _, err = call("plan", workload, files[1], *options)
    assert code == 3
    assert "tries at most 2,000,000 plans" in err


def test_compare_gives_every_planner_a_row_beside_the_same_bound(files) -> None:
    code, out, err = call("compare", *files, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["planner"] for row in rows] == list(planners.NAMES)
    assert all(set(row) == PLAN_KEYS for row in rows)
    # Halves extend into the next forward, and have a bound of their own.
    rows = [row for row in rows if row["planner"] != "dear"]
    assert len({row["lower_bound_s"] for row in rows}) == 1
    joint = next(row for row in rows if row["planner"] == "joint")
    # Rounding aside.
    fastest_s = min(row["iteration_s"] for row in rows)
    assert joint["iteration_s"] <= fastest_s * (1 + 1e-9)
    code, out, err = call("compare", *files)
    assert (code, err) == (0, "")
    assert all(name in out for name in planners.NAMES)


def test_the_page_s_bound_is_not_that_of_halves(files, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, _, err = call("compare", *files, "--report", page)
    assert (code, err) == (0, "")
    text = page.read_text()
    assert "dear" in text
    assert "in halves with" not in text


def test_simulate_agrees_with_the_plan_s_prediction_and_writes_a_trace(
    files, tmp_path
) -> None:
    plan_file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    call("plan", *files, "-o", plan_file)
    code, out, err = call(
        "simulate", *files, "--plan", plan_file, "--trace", trace, "--json"
    )
    assert (code, err) == (0, "")
    row = json.loads(out)
    plan = Plan.load(plan_file)
    assert row["iteration_s"] == plan.predicted.iteration_s
    assert set(row) == PLAN_KEYS - {"search_s"} | {"ranks", "efficiency"}
    timeline = Timeline.load(trace)
    assert timeline.end_s == pytest.approx(row["iteration_s"])
    lanes = {f"lane{i}" for i in range(plan.lanes)}
    assert lanes | {"compute"} >= set(timeline.tracks) > {"compute"}


def test_simulate_scales_over_ranks(files, tmp_path) -> None:
    code, out, _ = call(
        "simulate", *files, "--planner", "ddp", "--ranks", "1,2,16,2048", "--json"
    )
    assert code == 0
    rows = json.loads(out)["scaling"]
    assert [row["ranks"] for row in rows] == [1, 2, 16, 2048]
    times = [row["iteration_s"] for row in rows]
    assert times == sorted(times)
    assert times[0] == pytest.approx(0.12)
    assert rows[0]["efficiency"] == pytest.approx(1.0)
    plan_file = tmp_path / "plan.json"
    call("plan", *files, "--planner", "ddp", "-o", plan_file)
    code, fixed, _ = call(
        "simulate", *files, "--plan", plan_file, "--ranks", "16", "--json"
    )
    assert code == 0
    # DDP's buckets do not depend on the cluster: planning again gives the same.
    assert json.loads(fixed)["scaling"] == rows[2:3]
    code, out, _ = call("simulate", *files, "--planner", "ddp", "--ranks", "2,16")
    assert code == 0
    assert "ranks" in out
    assert "efficiency" in out


def test_simulate_refuses_what_does_not_belong_together(files, tmp_path) -> None:
    workload, cluster = files
    plan_file = tmp_path / "plan.json"
    call("plan", workload, cluster, "-o", plan_file)
    other = tmp_path / "other.json"
    a_workload("other").save(other)
    code, _, err = call("simulate", other, cluster, "--plan", plan_file)
    assert code == 2
    assert "another model" in err
    larger = tmp_path / "larger.json"
    replace(A_CLUSTER, hosts=8).save(larger)
    code, _, err = call("simulate", workload, larger, "--plan", plan_file)
    assert code == 2
    assert "4 ranks" in err
    both = ["--plan", plan_file, "--planner", "ddp"]
    assert call("simulate", workload, cluster, *both)[0] == 2
    assert call("simulate", workload, cluster)[0] == 2
    code, _, err = call("simulate", *files, "--planner", "ddp", "--ranks", "4,none")
    assert code == 2
    assert "'4,none'" in err


def test_ranks_must_fill_whole_hosts(files, tmp_path) -> None:
    wide = tmp_path / "wide.json"
    replace(A_CLUSTER, ranks_per_host=4).save(wide)
    code, _, err = call("simulate", files[0], wide, "--planner", "ddp", "--ranks", "6")
    assert code == 2
    assert "whole hosts of 4" in err
    code, out, _ = call(
        "simulate", files[0], wide, "--planner", "ddp", "--ranks", "2,8", "--json"
    )
    assert code == 0
    assert [row["ranks"] for row in json.loads(out)["scaling"]] == [2, 8]


def test_the_whole_process_works_without_torch(files, tmp_path) -> None:
    """Call it as a shell does; torch must not even be looked for."""
    program = (
        "import sys, runpy\n"
        "sys.modules['torch'] = None\n"  # an import of torch fails from here on
        "sys.argv = ['stretto', *sys.argv[1:]]\n"
        "try:\n"
        "    runpy.run_module('stretto', run_name='__main__')\n"
        "finally:\n"
        "    loaded = {name for name, module in sys.modules.items() if module}\n"
        "    heavy = loaded & {'torch', 'numpy', 'scipy', 'rich'}\n"
        "    print(sorted(heavy), file=sys.stderr)\n"
    )
    target = tmp_path / "plan.json"
    command = [sys.executable, "-c", program, "plan", *files, "-o", str(target)]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"
    assert json.loads(done.stdout)["planner"] == "joint"
    assert Plan.load(target).planner == "joint"


def test_errors_of_the_whole_process_are_one_line_and_a_code(files) -> None:
    command = [sys.executable, "-m", "stretto", "plan", *files, "--planner", "best"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("stretto: error: planner must be one of")
    assert done.stderr.count("\n") == 1


def test_plan_over_all_dimensions_and_without_some(files) -> None:
    code, out, _ = call("plan", *files, "--dims", "all", "--fastest", "--json")
    assert code == 0
    every = json.loads(out)
    options = ("--no-lanes", "--no-slices", "--time-limit", "5", "--json")
    code, out, _ = call("plan", *files, *options)
    assert code == 0
    fused = json.loads(out)
    assert fused["lanes"] == 1
    assert every["iteration_s"] < fused["iteration_s"]


def test_a_plan_shows_algorithms_where_they_differ(files) -> None:
    code, out, _ = call("plan", *files, "--dims", "fusion,algorithm")
    assert code == 0
    assert "halving_doubling" in out
    _, plain, _ = call("plan", *files)
    assert "algorithm" not in plain


def test_closing_the_dimension_that_an_option_opens_is_wrong_input(files) -> None:
    code, _, error = call("plan", *files, "--algorithms", "ring", "--no-algorithm")
    assert code == 2
    assert "pass one of them" in error


def test_an_unknown_dimension_is_wrong_input(files) -> None:
    code, _, error = call("plan", *files, "--dims", "fusion,speed")
    assert code == 2
    assert "got 'speed'" in error


def test_compare_says_what_each_dimension_contributes(files) -> None:
    code, out, _ = call("compare", *files, "--contributions", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["dimension"] for row in rows] == list(DIMS)
    times = [row["iteration_s"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0]
    code, out, _ = call("compare", *files, "--contributions")
    assert code == 0
    assert "+ lanes" in out


def test_compare_writes_a_page_with_ranks_gaps_and_contributions(
    files, tmp_path
) -> None:
    target = tmp_path / "page.html"
    options = ("--ranks", "16,2048", "--report", target)
    code, out, err = call("compare", *files, *options, "--json")
    assert (code, err) == (0, "")
    rows = {row["planner"]: row for row in json.loads(out)}
    scaled = [name for name, row in rows.items() if "scaling" in row]
    assert scaled == ["ddp", "mg-wfbp", "fusion", "joint"]
    html = target.read_text(encoding="utf-8")
    for name in ("scaling", "gaps", "contributions", "timelines"):
        assert f'<section id="{name}"' in html
    for name in scaled:
        assert [row["ranks"] for row in rows[name]["scaling"]] == [16, 2048]
        last_s = rows[name]["scaling"][-1]["iteration_s"]
        assert f">{name} {format_s(last_s)}</text>" in html
    for row in rows.values():
        assert f">{max(row['gap'], 0.0):.1%}</text>" in html
    assert all(f">+ {name}</text>" in html for name in DIMS[1:])
    assert "https:" not in html
    assert call("compare", *files, "--contributions", "--report", target)[0] == 2


TWO_PLANNERS = ("--planner", "ddp", "--planner", "aiacc", "--lanes", "3")


def test_simulate_takes_several_planners_and_writes_a_page(files, tmp_path) -> None:
    target = tmp_path / "page.html"
    options = (*TWO_PLANNERS, "--ranks", "4,64", "--report", target)
    code, out, err = call("simulate", *files, *options, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["planner"] for row in rows] == ["ddp", "aiacc"]
    assert rows[1]["lanes"] == 3
    assert [row["ranks"] for row in rows[1]["scaling"]] == [4, 64]
    html = target.read_text(encoding="utf-8")
    assert ">aiacc " + format_s(rows[1]["scaling"][1]["iteration_s"]) in html
    assert 'id="contributions"' not in html  # of joint, which was not asked for


def test_simulate_prints_each_planner_and_the_page_s_place(files, tmp_path) -> None:
    target = tmp_path / "page.html"
    options = (*TWO_PLANNERS, "--ranks", "4,64", "--report", target)
    code, out, _ = call("simulate", *files, *options)
    assert code == 0
    assert "\naiacc:\n" in out
    assert f"written to {target}" in out


def test_simulate_writes_a_page_about_a_plan(files, tmp_path) -> None:
    target, plan_file = tmp_path / "page.html", tmp_path / "plan.json"
    call("plan", *files, "-o", plan_file)
    fixed = ("--plan", plan_file, "--ranks", "4,64", "--report", target)
    assert call("simulate", *files, *fixed)[0] == 0
    assert "joint" in target.read_text(encoding="utf-8")


def test_simulate_writes_no_trace_of_several_planners(files, tmp_path) -> None:
    trace = tmp_path / "trace.json"
    assert call("simulate", *files, *TWO_PLANNERS, "--trace", trace)[0] == 2


def test_simulate_refuses_an_option_that_one_of_several_planners_lacks(files) -> None:
    sizes = ("--cap", "1MiB", "--unit", "1MiB")
    assert call("simulate", *files, *TWO_PLANNERS, *sizes)[0] == 0
    joint = ("--max-lanes", "2", "--dims", "all")
    code, _, err = call("simulate", *files, *TWO_PLANNERS, *joint)
    assert code == 2
    assert "planner ddp has no option --dims" in err


def test_more_lanes_than_the_largest_number_are_refused(files) -> None:
    options = ("--planner", "aiacc", "--lanes", "6", "--max-lanes", "4")
    code, _, err = call("plan", *files, *options)
    assert code == 2
    assert "--lanes must be at most the largest number of lanes" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "{w}", "{c}", "-o", "{w}"),
        ("plan", "{w}", "{c}", "-o", "{w}/../c.json"),
        ("plan", "-o", "{c}", "{w}", "{c}"),
        ("simulate", "{w}", "{c}", "--trace", "{w}"),
        ("simulate", "{w}", "{c}", "--trace", "{n}", "--report", "{n}"),
        ("compare", "{w}", "{c}", "--report", "{c}"),
        ("report", "{w}", "-o", "{w}"),
        ("convert", "{w}", "-o", "{w}", "--force"),
        ("run", "--plan", "{w}", "--report", "{w}", "train.py"),
    ],
)
def test_an_output_that_is_also_read_is_refused(arguments, tmp_path) -> None:
    w, c = tmp_path / "w.json", tmp_path / "c.json"
    a_workload().save(w)
    A_CLUSTER.save(c)
    before = w.read_bytes(), c.read_bytes()
    linked = tmp_path / "x"
    linked.mkdir()
    names = {"w": str(w), "c": str(c), "n": str(tmp_path / "new")}
    given = [a.replace("{w}/..", f"{linked}/..").format(**names) for a in arguments]
    code, _, err = call(*given)
    assert code == 2
    assert "is the same file as" in err
    assert (w.read_bytes(), c.read_bytes()) == before
    assert not (tmp_path / "new").exists()
