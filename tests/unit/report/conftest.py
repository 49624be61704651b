from __future__ import annotations

import pytest

from stretto.report import MethodResult, RunReport
from stretto.schema import (
    Bucket,
    Cluster,
    Link,
    Plan,
    Prediction,
    Span,
    TensorSpec,
    Timeline,
    Workload,
)


def timeline(name, end_s):
    spans = [
        Span(
            track="compute",
            name="forward",
            start_s=0.0,
            end_s=0.1,
            args={"kind": "forward"},
        ),
        Span(
            track="compute",
            name="backward",
            start_s=0.1,
            end_s=0.3,
            args={"kind": "backward"},
        ),
        Span(
            track="lane0",
            name="bucket 0",
            start_s=0.2,
            end_s=end_s,
            args={"kind": "send", "bucket": 0, "bytes": 4096},
        ),
        Span(
            track="lane0",
            name="wait bucket 1",
            start_s=0.25,
            end_s=end_s,
            args={"kind": "wait", "bucket": 1},
        ),
        Span(
            track="lane1",
            name="bucket <1>",
            start_s=0.3,
            end_s=end_s,
            args={"kind": "send", "bucket": 1},
        ),
    ]
    return Timeline(name=name, spans=tuple(spans))


@pytest.fixture
def workload():
    return Workload(
        name="toy & net",
        framework="pytorch",
        device="CPU",
        batch_per_rank=4,
        forward_s=0.1,
        backward_s=0.2,
        tensors=tuple(
            TensorSpec(name=n, bytes=b, dtype="float32", ready_s=r, needed_s=0.0)
            for n, b, r in (("b", 2**20, 0.1), ("a", 2**21, 0.2))
        ),
        provenance={"repetitions": 12},
    )


@pytest.fixture
def cluster():
    return Cluster(
        name="lab",
        hosts=4,
        ranks_per_host=1,
        inter_host=Link(
            latency_s=1e-4, bandwidth_bytes_per_s=1.25e8, stream_bytes_per_s=3.75e7
        ),
        intra_host=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9),
    )


def method(name, predicted_s, measured_s, workload, **other):
    lanes = 2 if name == "stretto" else 1
    figures = {
        "name": name,
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
        "spread_s": 0.01,
        "speedup_over_ddp": 0.8 / measured_s,
        "bound_share": 0.35 / measured_s,
        "final_loss": 0.5,
        "steps": (measured_s - 0.01, measured_s, measured_s + 0.01),
        "losses": (2.0, 1.0, 0.5),
        "predicted": timeline(f"{name}, predicted", predicted_s),
        "measured": timeline(name, measured_s),
        "description": f"how {name} does it",
        "plan": Plan(
            planner="joint" if name == "stretto" else name,
            workload_digest=workload.digest,
            ranks=4,
            overlap="backward",
            lanes=lanes,
            buckets=(Bucket(tensors=("b", "a"), slices=lanes, wire_dtype="float32"),),
            predicted=Prediction(
                iteration_s=predicted_s,
                backward_s=predicted_s - 0.1,
                exposed_communication_s=0.1,
                lower_bound_s=0.35,
                gap=predicted_s / 0.35 - 1,
            ),
        ),
    }
    return MethodResult(**(figures | other))


@pytest.fixture
def report(workload, cluster):
    return RunReport(
        title="toy on a lab",
        cluster=cluster,
        workload=workload,
        methods=(
            method("single", 0.88, 0.9, workload),
            method("ddp", 0.82, 0.8, workload),
            method("stretto", 0.39, 0.4, workload),
        ),
        bound_s=0.35,
        environment={"machine": "x86_64", "options": {"quick": True}},
        notes=("ranks share <two> cores",),
    )
