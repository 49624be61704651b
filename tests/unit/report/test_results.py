from __future__ import annotations

import dataclasses
import json
import math

import pytest

from stretto.errors import SpecError
from stretto.report import (
    Results,
    RunReport,
    report_of,
    results_json,
    results_of,
    save_results,
)
from stretto.schema import codec

METHOD_KEYS = [
    "name",
    "predicted_step_s",
    "measured_step_s",
    "spread_s",
    "speedup_over_ddp",
    "bound_share",
    "final_loss",
]


def test_a_method_in_the_results_has_exactly_the_agreed_keys(report):
    plain = results_json(report)
    assert [m["name"] for m in plain["methods"]] == ["single", "ddp", "stretto"]
    for row in plain["methods"]:
        assert sorted(row) == sorted(METHOD_KEYS)
    assert plain["kind"] == "results"
    assert plain["bound_s"] == 0.35
    assert plain["methods"][2]["measured_step_s"] == 0.4


def test_the_file_holds_the_same_and_is_read_again(report, tmp_path):
    file = tmp_path / "results.json"
    save_results(file, report)
    assert json.loads(file.read_text()) == results_json(report)
    assert codec.load(file, Results) == results_of(report)


def test_a_report_from_its_results_lacks_only_what_has_files_of_its_own(report):
    bare = dataclasses.replace(
        report,
        workload=None,
        cluster=None,
        methods=tuple(
            dataclasses.replace(m, predicted=None, measured=None, plan=None)
            for m in report.methods
        ),
    )
    assert report_of(results_of(report)) == bare


def test_a_broken_results_file_is_refused_at_its_place(report, tmp_path):
    plain = results_json(report)
    plain["methods"][1]["spread_s"] = "much"
    file = tmp_path / "results.json"
    file.write_text(json.dumps(plain))
    with pytest.raises(SpecError, match=r"\$\.methods\[1\]\.spread_s"):
        codec.load(file, Results)


def test_the_fastest_is_the_fastest_measured(report):
    assert report.fastest.name == "stretto"
    slow, *others = report.methods
    guess = dataclasses.replace(slow, measured_step_s=None, predicted_step_s=0.01)
    assert dataclasses.replace(report, methods=(guess, *others)).fastest.name == (
        "stretto"
    )
    assert RunReport(title="nothing").fastest is None


def test_errors_of_prediction_are_summed_up_by_size_not_by_sign(report):
    errors = [0.88 / 0.9 - 1, 0.82 / 0.8 - 1, 0.39 / 0.4 - 1]
    sizes = [abs(error) for error in errors]
    assert report.mean_error_ratio == pytest.approx(sum(sizes) / 3)
    assert report.worst_error_ratio == pytest.approx(max(sizes))
    assert RunReport(title="nothing").mean_error_ratio is None


def test_a_method_that_occurs_twice_is_refused(report):
    with pytest.raises(SpecError, match="'ddp' occurs twice"):
        dataclasses.replace(report, methods=(*report.methods, report.methods[1]))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_times_are_refused(report, value):
    with pytest.raises(SpecError, match="measured_step_s"):
        dataclasses.replace(report.methods[0], measured_step_s=value)
