from __future__ import annotations

import dataclasses

import pytest

from stretto.errors import PlanMismatch
from stretto.report import methods_table, plan_table, planners_table

ROW = {
    "planner": "ddp",
    "iteration_s": 0.82,
    "backward_s": 0.7,
    "exposed_communication_s": 0.5,
    "lower_bound_s": 0.35,
    "gap": 1.343,
    "bound_scope": "ring all-reduces overlapped with backward",
    "lanes": 1,
    "buckets": 3,
    "search_s": 0.002,
}


def cells(table, first):
    line = next(x for x in table.splitlines() if x.strip().startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_planners_are_listed_one_per_row_in_the_order_given():
    best = ROW | {"planner": "joint", "iteration_s": 0.39, "gap": 0.114, "lanes": 4}
    table = planners_table([ROW, best])
    assert cells(table, "ddp") == [
        "ddp", "820 ms", "500 ms", "134.3%", "1", "3", "2.00 ms",
    ]  # fmt: skip
    assert cells(table, "joint")[1] == "390 ms"
    assert table.index("ddp") < table.index("joint")
    words = " ".join(table.split())
    assert (
        "no plan with ring all-reduces overlapped with backward can be faster than "
        "350 ms per step" in words
    )


def test_bounds_that_differ_name_their_planners():
    other = ROW | {"planner": "x", "lower_bound_s": 0.3, "bound_scope": "rings in rows"}
    words = " ".join(planners_table([ROW, other]).split())
    assert "ddp: no plan with ring all-reduces overlapped with backward" in words
    assert "x: no plan with rings in rows can be faster than 300 ms per step" in words


def test_what_was_not_timed_is_a_dash():
    row = {key: value for key, value in ROW.items() if key != "search_s"}
    assert cells(planners_table([row]), "ddp")[-1] == "-"


def test_methods_show_prediction_beside_measurement(report):
    table = methods_table(report)
    assert cells(table, "stretto") == [
        "stretto", "390 ms", "400 ms", "± 10.0 ms", "-2.5%", "2.00 x", "1.14 x", "0.5",
    ]  # fmt: skip
    assert all(len(line) <= 100 for line in table.splitlines())


def test_what_is_not_known_is_a_dash(report):
    m = dataclasses.replace(
        report.methods[0], measured_step_s=None, spread_s=None, final_loss=None
    )
    table = methods_table(dataclasses.replace(report, methods=(m,)))
    assert cells(table, "single")[2:5] == ["-", "-", "-"]


def test_a_plan_is_shown_bucket_by_bucket(report, workload):
    table = plan_table(report.methods[2].plan, workload)
    assert cells(table, "0") == ["0", "2", "3 MiB", "200 ms", "0", "2", "a"]


def test_a_launch_order_is_shown_with_the_times_of_need(report, workload):
    plan = report.methods[2].plan
    buckets = [dataclasses.replace(plan.buckets[0], tensors=(n,)) for n in "ba"]
    plan = dataclasses.replace(
        plan, overlap="forward", buckets=tuple(buckets), launch=(1, 0)
    )
    needed_s = {"a": 0.02, "b": 0.07}
    tensors = [
        dataclasses.replace(t, needed_s=needed_s[t.name]) for t in workload.tensors
    ]
    workload = dataclasses.replace(workload, tensors=tuple(tensors))
    table = plan_table(plan, workload)
    rows = [line.split() for line in table.splitlines()[2:4]]
    assert [row[0] for row in rows] == ["1", "0"]
    assert "20.0 ms" in " ".join(rows[0])
    assert "70.0 ms" in " ".join(rows[1])


def test_a_plan_for_another_model_is_refused(report, workload):
    other = dataclasses.replace(workload, tensors=workload.tensors[:1])
    with pytest.raises(PlanMismatch):
        plan_table(report.methods[2].plan, other)


@pytest.mark.parametrize("width", [60, 100])
def test_tables_keep_to_their_width(report, width):
    table = methods_table(report, width=width)
    assert max(map(len, table.splitlines())) <= width
