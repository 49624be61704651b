"""The files of a run that ends early; those of a whole run are in `tests/lab`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto import planners
from stretto.schema import Cluster, Link, Plan, TensorSpec, Workload
from stretto.schema.tuning import Tuning
from stretto.tune.artifacts import Files, RunArtifacts
from stretto.tune.result import TuningResult
from support.instances import one_link

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settled() -> TuningResult:
    workload = Workload(
        name="small",
        framework="pytorch",
        device="cpu",
        batch_per_rank=4,
        forward_s=0.1,
        backward_s=0.2,
        tensors=tuple(
            TensorSpec(name=n, bytes=2**20, dtype="float32", ready_s=r, needed_s=0.0)
            for n, r in (("b", 0.1), ("a", 0.2))
        ),
    )
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    cluster = one_link(link)
    return TuningResult(
        workload=workload,
        cluster=cluster,
        plan=planners.get("joint").plan(workload, cluster),
        ddp=planners.get("ddp").plan(workload, cluster),
        step_s=0.31,
        record=Tuning(name="small", events=()),
    )


def files_in(folder: Path) -> Files:
    names = ("plan", "profile", "cluster", "trace", "report", "tuning")
    return Files(**{name: str(folder / name) for name in names})


def test_what_is_known_is_written_and_the_rest_is_named(
    tmp_path: Path, settled: TuningResult
) -> None:
    keeper = RunArtifacts(files_in(tmp_path), 0, title="Net on 2 ranks")
    said = keeper.unfinished(settled)
    written = [tmp_path / n for n in ("profile", "cluster", "plan", "tuning", "report")]
    names = ", ".join(map(str, written))
    assert said == f"this is in {names}; not written: {tmp_path / 'trace'}"
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert Plan.load(tmp_path / "plan") == settled.plan
    assert Workload.load(tmp_path / "profile") == settled.workload
    assert Cluster.load(tmp_path / "cluster") == settled.cluster
    page = (tmp_path / "report").read_text()
    assert "Net on 2 ranks" in page
    assert "The run ended before tuning had settled." in page
    assert "310 ms" in page


def test_where_nothing_is_known_nothing_is_written(tmp_path: Path) -> None:
    keeper = RunArtifacts(Files(plan=str(tmp_path / "p")), 0, title="t")
    assert keeper.unfinished(None) == f"not written: {tmp_path / 'p'}"
    assert RunArtifacts(Files(), 0, title="t").unfinished(None) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_not_be_written_is_named(
    tmp_path: Path, settled: TuningResult, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "no" / "plan")
    keeper = RunArtifacts(Files(plan=path), 0, title="t")
    assert keeper.unfinished(settled) == f"not written: {path}"
    assert len(caplog.records) == 1


def test_a_run_that_ends_soon_after_settling_has_a_report_without_steps(
    tmp_path: Path, settled: TuningResult, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = RunArtifacts(files_in(tmp_path), 0, title="t")
    keeper.settled(settled)
    keeper.end()
    assert "before 8 steps were recorded" in (tmp_path / "report").read_text()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"not written: {tmp_path / 'trace'}: the run ended before 8 steps were recorded"
    )


def test_after_its_end_was_reported_nothing_more_is_logged(
    tmp_path: Path, settled: TuningResult, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = RunArtifacts(files_in(tmp_path), 0, title="t")
    keeper.unfinished(settled)
    keeper.end()
    assert not caplog.records
    RunArtifacts(Files(plan=str(tmp_path / "p")), 0, title="t").end()
    assert not caplog.records
    # Without a plan to settle on there are only steps to show.
    RunArtifacts(files_in(tmp_path), 0, title="t").end()
    (record,) = caplog.records
    assert str(tmp_path / "report") in record.getMessage()
