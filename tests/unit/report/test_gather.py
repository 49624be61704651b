from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from stretto.cli._main import main
from stretto.errors import SpecError
from stretto.report import page, save_results, save_trace
from stretto.report.gather import gather
from stretto.report.trace import labeled_timelines, split_label
from stretto.schema.timeline import load_timelines


@pytest.fixture
def folder(tmp_path, report):
    """A demo's folder: all files of a report."""
    save_results(tmp_path / "results.json", report)
    save_trace(tmp_path / "trace.json", report)
    report.workload.save(tmp_path / "workload.json")
    report.cluster.save(tmp_path / "cluster.json")
    for m in report.methods:
        m.plan.save(tmp_path / f"plan-{m.name}.json")
    return tmp_path


def test_a_report_is_found_again_in_its_files(folder, report):
    found = gather(sorted(folder.iterdir()))
    assert found.title == report.title
    assert (found.workload, found.cluster) == (report.workload, report.cluster)
    assert found.bound_s == report.bound_s
    for before, after in zip(report.methods, found.methods, strict=True):
        assert before.plan == after.plan
        assert before.predicted.spans == after.predicted.spans
        assert before.measured.spans == after.measured.spans
        assert before.steps == after.steps
    assert page.render(found) == page.render(report)


def test_plans_alone_make_a_page_of_predictions(folder):
    found = gather([folder / "plan-ddp.json", folder / "plan-stretto.json"])
    assert [m.name for m in found.methods] == ["ddp", "joint"]
    assert [m.predicted_step_s for m in found.methods] == [0.82, 0.39]
    assert found.bound_s == 0.35
    assert found.fastest is None


def test_the_least_bound_is_shown_with_its_own_scope(folder, report):
    plan = report.methods[0].plan
    for name, bound_s, scope in (("a", 0.34, "trees"), ("b", 0.36, "rings")):
        predicted = replace(plan.predicted, lower_bound_s=bound_s, bound_scope=scope)
        replace(plan, predicted=predicted).save(folder / f"plan-{name}.json")
    files = [folder / "plan-b.json", folder / "plan-a.json"]
    for paths in (files, files[::-1]):
        found = gather(paths)
        assert (found.bound_s, found.bound_scope) == (0.34, "trees")
        assert "No plan with trees can be left of" in page.render(found)
    save_results(folder / "again.json", found)
    assert gather([folder / "again.json"]).bound_scope == "trees"


def test_two_plans_of_one_planner_keep_apart(folder, report):
    report.methods[1].plan.save(folder / "plan-ddp-small.json")
    found = gather([folder / "plan-ddp.json", folder / "plan-ddp-small.json"])
    assert [m.name for m in found.methods] == ["ddp", "ddp-small"]


@pytest.mark.parametrize(
    ("file", "name", "side"),
    [
        ("ddp predicted.json", "ddp", "predicted"),
        ("ddp-measured.json", "ddp", "measured"),
        ("new.json", "new", "measured"),
    ],
)
def test_a_timeline_goes_to_the_method_that_its_file_names(
    folder, report, file, name, side
):
    line = report.methods[1].measured
    line.save(folder / file)
    found = gather([folder / "results.json", folder / file])
    method = next(m for m in found.methods if m.name == name)
    assert getattr(method, side) == line


def test_a_timeline_that_calls_itself_predicted_is(folder, report):
    report.methods[1].predicted.save(folder / "line.json")
    found = gather([folder / "line.json"])
    assert found.methods[0].predicted is not None
    assert found.methods[0].measured is None


def test_labels_of_a_trace_name_method_and_side(report):
    labels = list(labeled_timelines(report))
    assert labels[:2] == ["single predicted", "single measured"]
    assert split_label("mg-wfbp predicted") == ("mg-wfbp", "predicted")
    assert split_label("ddp best measured") == ("ddp best", "measured")
    assert split_label("measured") == ("measured", "measured")
    assert split_label("rank 3") == ("rank 3", "measured")


def test_the_trace_is_one_that_viewers_open(folder):
    trace = json.loads((folder / "trace.json").read_text())
    kinds = {event["ph"] for event in trace["traceEvents"]}
    assert kinds == {"M", "X"}
    named = {
        (e["pid"], e["tid"]) for e in trace["traceEvents"] if "thread" in e["name"]
    }
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    assert len(load_timelines(folder / "trace.json")) == 6


def test_a_second_file_of_what_occurs_once_is_refused(folder, report):
    report.cluster.save(folder / "other.json")
    with pytest.raises(SpecError, match="one cluster file"):
        gather([folder / "cluster.json", folder / "other.json"])


@pytest.mark.parametrize("text", ['{"kind": "recipe"}', "{}", "[]", "no"])
def test_a_foreign_file_is_refused_by_name(tmp_path, text):
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"odd\.json"):
        gather([file])


def run(*args):
    return CliRunner().invoke(_command(), list(map(str, args)))


def _command():
    from stretto.cli.report import command

    return command


def test_the_command_writes_the_page_and_says_where(folder, report, tmp_path):
    result = run(*sorted(folder.glob("*.json")), "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text() == page.render(report)


def test_a_broken_file_ends_with_2_and_writes_nothing(folder, capsys):
    (folder / "workload.json").write_text('{"kind": "workload"}')
    target = folder / "page.html"
    with pytest.raises(SystemExit) as caught:
        main(["report", str(folder / "workload.json"), "-o", str(target)])
    assert caught.value.code == 2
    assert "$.schema_version" in capsys.readouterr().err
    assert not target.exists()


def test_no_files_is_a_usage_error():
    assert run().exit_code == 2
