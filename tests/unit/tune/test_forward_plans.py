"""Whether plans may overlap with forward, and which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.planners.base import predicted_s
from stretto.schema import TensorSpec, Workload
from stretto.tune.calibration import CalibratedModel
from stretto.tune.forward_plans import forward_or_why, needed_early, verdict_of
from stretto.tune.starts import starts_of

if TYPE_CHECKING:
    from stretto.runtime.forward.reads import ReadsReport
    from stretto.schema import Cluster, Plan
    from stretto.tune.forward_plans import ForwardVerdict

LAYERS = 12


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Equal layers, whose communication takes about as long as their computation."""
    return Workload(
        name="balanced",
        framework="torch",
        device="cpu",
        batch_per_rank=1,
        forward_s=0.05,
        backward_s=0.1,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=2**20,
                dtype="float32",
                ready_s=0.099 * (i + 1) / LAYERS,
                needed_s=0.05 * (LAYERS - 1 - i) / LAYERS,
            )
            for i in range(LAYERS)
        ),
    )


FREE: ReadsReport = {"prevents": None, "early": [], "reader": None}


def test_what_prevents_it_on_one_rank_prevents_it_on_all() -> None:
    clips: ReadsReport = {**FREE, "prevents": "train.py:88 reads gradients"}
    assert verdict_of([FREE, clips])["prevents"] == "train.py:88 reads gradients"
    assert verdict_of([FREE, FREE])["prevents"] is None


def test_what_one_rank_reads_early_is_needed_early() -> None:
    rows: list[ReadsReport | None] = [
        {**FREE, "early": ["b"], "reader": "train.py:9 reads parameters"},
        {**FREE, "early": ["a", "b"]},
    ]
    found = verdict_of(rows)
    assert found["early"] == ["a", "b"]
    assert found["reader"] == "train.py:9 reads parameters"


def test_ranks_that_differ_in_the_option_do_without() -> None:
    assert verdict_of([FREE, None])["prevents"] is not None


def test_only_parameters_read_early_change_their_need(workload: Workload) -> None:
    name = workload.tensors[0].name
    found = needed_early(workload, [name])
    assert found.tensors[0].needed_s == 0.0
    assert found.tensors[1:] == workload.tensors[1:]


def chosen(
    workload: Workload,
    cluster: Cluster,
    verdict: ForwardVerdict,
    planner: str = "joint",
) -> tuple[Plan | None, str | None, Plan]:
    backward = planners.plan_with_wire(workload, cluster, planner)
    found, why = forward_or_why(
        verdict, workload, cluster, backward, planner=planner, wire_dtype=None
    )
    return found, why, backward


def test_a_forward_plan_is_a_rival_where_it_is_predicted_faster(
    workload: Workload, cluster: Cluster
) -> None:
    found, why, backward = chosen(workload, cluster, verdict_of([FREE]))
    assert found is not None
    assert why is None
    assert found.overlap == "forward"
    assert predicted_s(found) < predicted_s(backward)


def test_parameters_that_are_all_read_early_leave_nothing_to_gain(
    workload: Workload, cluster: Cluster
) -> None:
    names = [tensor.name for tensor in workload.tensors]
    verdict = verdict_of([{**FREE, "early": names, "reader": "train.py:9 reads"}])
    found, why, _ = chosen(needed_early(workload, names), cluster, verdict)
    assert (found, why) == (None, "train.py:9 reads")


def test_a_reason_against_it_makes_no_plan(
    workload: Workload, cluster: Cluster
) -> None:
    verdict = verdict_of([{**FREE, "prevents": "a closure"}])
    assert chosen(workload, cluster, verdict)[:2] == (None, "a closure")


def test_other_planners_make_no_forward_plans(
    workload: Workload, cluster: Cluster
) -> None:
    _, why, _ = chosen(workload, cluster, verdict_of([FREE]), "aiacc")
    assert why == "planner aiacc makes no such plans"


def test_a_model_with_forward_plans_has_the_lower_bound(
    workload: Workload, cluster: Cluster
) -> None:
    without = CalibratedModel(workload, cluster)
    within = CalibratedModel(workload, cluster, forward=True)
    assert within.bound_s < without.bound_s


def test_a_corrected_model_may_turn_to_a_forward_plan(
    workload: Workload, cluster: Cluster
) -> None:
    model = CalibratedModel(workload, cluster, forward=True)
    plan = planners.get("ddp").plan(workload, cluster)
    model.learn(plan, 1.2 * predicted_s(plan), None)
    again = model.replan()
    assert again is not None
    assert again.overlap == "forward"


def test_a_forward_plan_starts_after_the_planner_s(
    workload: Workload, cluster: Cluster
) -> None:
    backward = planners.plan_with_wire(workload, cluster, "joint")
    ddp = planners.get("ddp").plan(workload, cluster)
    forward = replace(backward, overlap="forward")
    names = [name for name, _ in starts_of(planned=backward, ddp=ddp, forward=forward)]
    assert names[names.index("planner") + 1] == "forward"
