"""When a running job's plan changes, and a job that follows another plan."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from stretto import zoo
from stretto.cluster.job_replan import predict
from stretto.cluster.replanning import (
    CHECKING,
    OFF,
    WATCHING,
    Change,
    Measure,
    PlanPrediction,
    Replanning,
    Rules,
)
from stretto.plan_requests import (
    CHANGE,
    MEASURED,
    JobReports,
    PlanRequest,
    RequestFolder,
)
from stretto.planners.burst.plan import same_width
from stretto.schema.burst import BatchTime, Layer, LayerProfile, LayerTiming
from stretto.schema.job import BurstOptions
from support.clusters import await_that, cluster, job

if TYPE_CHECKING:
    from pathlib import Path

NOW, OTHER = "the plan", "another plan"


class Job:
    """A job of virtual steps, and what is decided for it."""

    def __init__(self, **rules: float) -> None:
        self.decided = Replanning(NOW, Rules(**rules))
        self.steps = 0

    def report(self, *times_s: float, steps: int = 100):
        """Report steps; return the last decision."""
        found = None
        for step_s in times_s:
            self.steps += steps
            found = self.decided.step(self.steps, step_s)
        return found

    def measured(self, now_s: float, new_s: float, plan: str = OTHER):
        """Let the planner predict; return the decision."""
        assert self.decided.measured()
        found = PlanPrediction(now_s=now_s, new_s=new_s, plan=plan)
        return self.decided.planned(found)

    def changed(self) -> None:
        """Change to another plan."""
        assert isinstance(self.report(1.0, 1.0, 1.0), Measure)
        assert isinstance(self.measured(1.0, 0.5), Change)
        assert self.decided.changed(took_s=1.0) is not None


def test_steady_steps_are_measured_once() -> None:
    job = Job()
    assert job.report(1.0, 1.0) is None
    assert isinstance(job.report(1.0), Measure)
    assert job.measured(1.0, 1.0) is None
    assert job.report(*[1.05, 0.96] * 20) is None


def test_steps_that_have_changed_for_several_reports_are_measured_again() -> None:
    job = Job(min_pause_reports=0)
    job.report(1.0, 1.0, 1.0)
    job.measured(1.0, 1.0)
    assert job.report(1.2, 1.2) is None
    assert isinstance(job.report(1.2), Measure)


def test_a_single_long_step_is_no_change() -> None:
    job = Job(min_pause_reports=0)
    job.report(1.0, 1.0, 1.0)
    job.measured(1.0, 1.0)
    assert job.report(1.0, 5.0, 1.0, 5.0, 1.0) is None


def test_measurements_have_a_pause_between_them() -> None:
    job = Job(min_pause_reports=10)
    job.report(1.0, 1.0, 1.0)
    job.measured(1.0, 1.0)
    assert job.report(*[2.0] * 9) is None
    assert isinstance(job.report(2.0), Measure)


@pytest.mark.parametrize(("gain", "changes"), [(0.04, False), (0.06, True)])
def test_a_plan_must_gain_five_per_cent(gain: float, changes: bool) -> None:
    job = Job(first_change_steps=0.0)
    job.report(1.0, 1.0, 1.0)
    found = job.measured(1.0, 1.0 - gain)
    assert (found is not None) == changes


def test_a_plan_waits_until_its_gain_repays_the_change_ten_times() -> None:
    job = Job(first_change_steps=10.0)
    job.report(1.0, 1.0, 1.0)
    assert job.measured(1.0, 0.75) is None  # 0.25 s * 300 steps < 10 * 10 s
    found = job.report(1.0)
    assert isinstance(found, Change)
    assert (found.plan, found.step_s) == (OTHER, 1.0)
    assert found.predicted_s == pytest.approx(0.75)


def test_the_present_plan_is_not_requested_again() -> None:
    job = Job(first_change_steps=0.0)
    job.report(1.0, 1.0, 1.0)
    assert job.measured(1.0, 0.5, NOW) is None


def test_a_faster_plan_stays() -> None:
    job = Job()
    job.changed()
    assert job.decided.state == CHECKING
    assert job.report(0.6, 0.6, 0.6) is None
    assert (job.decided.state, job.decided.plan) == (WATCHING, OTHER)


def test_a_plan_that_is_no_faster_is_taken_back_and_not_tried_again() -> None:
    job = Job()
    job.changed()
    found = job.report(1.1, 1.1, 1.1)
    assert isinstance(found, Change)
    assert (found.plan, found.predicted_s) == (NOW, 1.0)
    assert job.decided.changed(took_s=1.0) is not None
    assert job.decided.plan == NOW
    assert job.report(*[1.0] * 50) is None


def test_a_job_that_reads_no_requests_is_asked_once() -> None:
    job = Job(patience_reports=5)
    assert isinstance(job.report(1.0, 1.0, 1.0), Measure)
    assert job.report(*[1.0] * 3, *[2.0] * 30) is None
    assert job.decided.state == OFF


def test_a_refused_plan_is_not_requested_again_while_steps_stay() -> None:
    job = Job()
    job.report(1.0, 1.0, 1.0)
    assert isinstance(job.measured(1.0, 0.5), Change)
    job.decided.refused()
    assert job.report(*[1.0] * 30) is None
    assert job.decided.plan == NOW


# requests and reports


def test_a_request_is_read_once(tmp_path: Path) -> None:
    folder, reports = RequestFolder(tmp_path / "r"), JobReports(tmp_path / "r")
    assert reports.next() is None
    folder.create()
    request = PlanRequest(number=1, kind=CHANGE, plan="text")
    folder.write(request)
    assert reports.next() == request
    assert reports.next() is None


def test_reports_are_read_once_and_invalid_lines_are_skipped(tmp_path: Path) -> None:
    folder, reports = RequestFolder(tmp_path), JobReports(tmp_path)
    reports.add(MEASURED, 1, timings=[])
    with (tmp_path / "reports.jsonl").open("a") as file:
        file.write('no json\n[]\n{"kind": "measured"}\n{"kind": "cut')
    found = folder.reports()
    assert found == [{"kind": MEASURED, "number": 1, "timings": []}]
    assert folder.reports() == []


# plans


def profile_of(compute_s: float) -> LayerProfile:
    """Return two layers whose parameters take some ms to synchronize."""
    times = tuple(
        BatchTime(
            samples=n, forward_s=compute_s * n / 48, backward_s=compute_s * n / 24
        )
        for n in (8, 16)
    )
    layers = (
        Layer(
            name="a",
            inputs=(),
            parameter_bytes=200_000_000,
            activation_bytes=8,
            times=times,
        ),
        Layer(
            name="b",
            inputs=("a",),
            parameter_bytes=200_000_000,
            activation_bytes=8,
            times=times,
        ),
    )
    return LayerProfile(name="two", device="cpu", layers=layers)


def widths(plan: str) -> set[int]:
    return {row["gpus"] for row in json.loads(plan)["layers"]}


def plan_of(profile: LayerProfile, gpus: int):
    from stretto.cost.burst import BurstNetwork
    from stretto.planners.burst.problem import BurstProblem

    network = zoo.cluster("deeppool")
    problem = BurstProblem.of(
        profile, BurstNetwork.of(network, 2), gpus=2, batch=16, widths="powers"
    )
    return same_width(problem, gpus)


@pytest.mark.parametrize(("speed", "best"), [(1.0, 2), (1 / 64, 1)])
def test_the_best_plan_follows_the_measured_layers(speed: float, best: int) -> None:
    profile = profile_of(0.02)
    timings = [
        LayerTiming(
            layer=layer.name,
            samples=8,
            forward_s=layer.time_of(8)[0] * speed,
            backward_s=layer.time_of(8)[1] * speed,
        )
        for layer in profile.layers
    ]
    found = predict(
        plan_of(profile, 3 - best),
        profile,
        zoo.cluster("deeppool"),
        timings,
        amplification_limit=None,
    )
    assert widths(found.plan) == {best}
    assert found.new_s < found.now_s


# a job on the local engine

SCRIPT = """
import json, os, time
from pathlib import Path
from stretto.plan_requests import CHANGED, MEASURED, JobReports
from stretto.step_counts import StepCounter

def width(text):
    return max(row["gpus"] for row in json.loads(text)["layers"])

counter = StepCounter(os.environ["STRETTO_STEP_COUNTS"], int(os.environ["RANK"]))
reports = JobReports(os.environ["STRETTO_PLAN_REQUESTS"])
gpus = width(Path(os.environ["STRETTO_CLUSTER_PLAN"]).read_text())
Path(f"uses{gpus}").touch()
while not Path("go").exists():
    layer_s = float(Path("layer_s").read_text())  # of all samples
    time.sleep(2 * layer_s / gpus + (0.005 if gpus > 1 else 0.0))
    counter.add()
    request = reports.next() if os.environ["RANK"] == "0" else None
    if request is None:
        continue
    if request.kind == "measure":
        rows = [
            {"layer": name, "samples": 16 // gpus, "forward_s": layer_s / 3 / gpus,
             "backward_s": layer_s / 1.5 / gpus}
            for name in "ab"
        ]
        reports.add(MEASURED, request.number, timings=rows)
    else:
        gpus = width(request.plan)
        Path(f"uses{gpus}").touch()
        reports.add(CHANGED, request.number, took_s=0.001)
"""
"""Sleeps instead of computing; the file ``layer_s`` is its speed."""


def test_a_job_whose_speed_changes_follows_another_plan_without_a_restart(
    tmp_path: Path,
) -> None:
    profile_of(0.02).save(tmp_path / "layers.json")
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "layer_s").write_text("0.0003")  # the profile says 0.02
    with cluster(
        tmp_path / "c", hosts=1, policy="deeppool", report_every_s=0.1
    ) as found:
        spec = job(
            tmp_path,
            f"exec {sys.executable} job.py",
            devices=2,
            batch=16,
            burst=BurstOptions(
                factory="job.py:make", profile="layers.json", replan=True
            ),
        )
        name = found.submit(spec)
        for gpus in (2, 1):
            await_that((tmp_path / f"uses{gpus}").exists, lambda: str(found.rows(name)))
        (tmp_path / "uses2").unlink()
        slow = tmp_path / "slow"
        slow.write_text("0.02")
        slow.replace(tmp_path / "layer_s")
        await_that((tmp_path / "uses2").exists, lambda: str(found.rows(name)))
        (tmp_path / "go").touch()
        end = found.await_state(name, "done")
        assert end["attempt"] == 1
        changes = [r["data"] for r in found.rows(name) if r["kind"] == "replanned"]
        assert len(changes) >= 2
        assert all(row["predicted_s"] <= row["step_s"] for row in changes)
