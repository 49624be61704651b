"""Plans that send gradients in a narrower type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto import _api, planners
from stretto.errors import SpecError
from stretto.planners.wire import narrowed
from stretto.schema import AllReduceFit, Cluster, Link, TensorSpec, Workload
from stretto.sim.step import simulate_step
from support.instances import one_link


def workload(*dtypes: str) -> Workload:
    width = {"float64": 8, "float32": 4, "float16": 2, "int64": 8}
    return Workload(
        name="w",
        framework="pytorch",
        device="cpu",
        batch_per_rank=1,
        forward_s=0.01,
        backward_s=0.02,
        tensors=tuple(
            TensorSpec(
                name=f"t{i}",
                bytes=width[dtype] * 250_000 * (i + 1),
                dtype=dtype,
                ready_s=0.02 * (i + 1) / len(dtypes),
                needed_s=0.01 * (1 - (i + 1) / len(dtypes)),
            )
            for i, dtype in enumerate(dtypes)
        ),
    )


def cluster() -> Cluster:
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    fit = AllReduceFit(startup_s=1e-4, s_per_byte=1.5e-9, ranks=4)
    return one_link(link, hosts=4, allreduce=fit)


FOUR = ("float32",) * 4


def iteration_s(plan: Any) -> float:
    assert plan.predicted is not None
    return float(plan.predicted.iteration_s)


def test_half_the_bytes_is_predicted_as_the_simulator_has_it() -> None:
    work, on = workload(*FOUR), cluster()
    for name in ("joint", "ddp", "wfbp", "single", "mg-wfbp"):
        wide = _api.plan(work, on, name)
        narrow = _api.plan(work, on, name, wire_dtype="float16")
        assert {b.wire_dtype for b in narrow.buckets} == {"float16"}
        narrow.check_matches(work)
        assert iteration_s(narrow) < iteration_s(wide)
        # The plan's own prediction is that of the simulator on the true workload.
        assert iteration_s(narrow) == pytest.approx(
            simulate_step(work, on, narrow).iteration_s, rel=1e-12
        )
        again = _api.with_prediction(
            replace(narrow, predicted=None), work, on
        ).predicted
        assert again is not None
        assert again.gap >= -1e-9
        assert again.lower_bound_s == pytest.approx(
            narrow.predicted.lower_bound_s,  # type: ignore[union-attr]
            rel=1e-9,
        )


def test_types_that_can_not_travel_so_keep_their_own() -> None:
    work = workload("float64", "float64", "float32", "float32")
    plan = planners.plan_with_wire(work, cluster(), "joint", wire_dtype="bfloat16")
    wires = {n: b.wire_dtype for b in plan.buckets for n in b.tensors}
    assert wires == {
        "t0": "float64",
        "t1": "float64",
        "t2": "bfloat16",
        "t3": "bfloat16",
    }
    assert planners.plan_with_wire(work, cluster(), "joint") == planners.get(
        "joint"
    ).plan(work, cluster())


@pytest.mark.parametrize(
    ("dtypes", "wire", "words"),
    [
        (FOUR, "float32", ("float32", "bfloat16 or float16")),
        (("float16",), "bfloat16", ("float16", "leave it out")),
        (("float32", "float16"), "float16", ("already", "beside float32")),
    ],
)
def test_a_wire_that_gains_nothing_is_refused(
    dtypes: tuple[str, ...], wire: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as raised:
        narrowed(workload(*dtypes), wire)
    for word in words:
        assert word in str(raised.value)
