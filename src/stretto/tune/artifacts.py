"""Files that a run writes about itself, as the options of `stretto run` request."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self, final

import torch
import torch.distributed as dist

from stretto import variable_names
from stretto._version import __version__
from stretto.errors import SpecError
from stretto.logs import get_logger
from stretto.report import MethodResult, RunReport, save, save_trace
from stretto.runtime import Recorder
from stretto.runtime.recording.gathering import GATHER_S, RecordGathering
from stretto.runtime.recording.merging import merged_timeline
from stretto.runtime.store import ranks_of
from stretto.schema import Plan
from stretto.sim.step import simulate_step
from stretto.tune import TuningResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stretto.runtime import DistributedDataParallel
    from stretto.runtime.recording.gathering import RankRecord
    from stretto.runtime.recording.step import StepMarks

_log = get_logger(__name__)

RECORDED_STEPS = 8
"""Number of steps after settling for a trace and a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Path of each file; ``None``: not written."""

    plan: str | None = None
    profile: str | None = None
    cluster: str | None = None
    trace: str | None = None
    report: str | None = None
    tuning: str | None = None

    @property
    def of_steps(self) -> bool:
        """Return whether a file shows steps, for which every rank records."""
        return self.trace is not None or self.report is not None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the files that the variables of `stretto run` request."""
        return cls(
            plan=environment.get(variable_names.SAVE_PLAN),
            profile=environment.get(variable_names.PROFILE),
            cluster=environment.get(variable_names.CLUSTER),
            trace=environment.get(variable_names.TRACE),
            report=environment.get(variable_names.REPORT),
            tuning=environment.get(variable_names.TUNING),
        )


@final
class RunArtifacts:
    """Records some steps on every rank; rank 0 writes the files of the run."""

    def __init__(self, files: Files, rank: int, *, title: str) -> None:
        """Write ``files`` of a run; ``title`` is the report's title."""
        self._files = files
        self._rank = rank
        self._title = title
        self._settled: TuningResult | None = None
        self._recorder: Recorder | None = None
        self._gathering: RecordGathering | None = None
        self._seen = 0
        self.done = False
        """Return whether the training thread has nothing left to do."""

    @classmethod
    def of_environment(cls, rank: int, *, title: str) -> RunArtifacts | None:
        """Return the artifacts that the environment requests, if any.

        Rank 0 writes alone what it alone knows; timelines include all ranks.
        """
        files = Files.of(os.environ)
        if files == Files() or (rank != 0 and not files.of_steps):
            return None
        return cls(files, rank, title=title)

    def settled(self, settled: TuningResult) -> None:
        """Keep the measurement and the decision."""
        if self._rank != 0:
            return
        self._settled = settled
        self._save(settled)

    def _save(self, settled: TuningResult) -> list[str]:
        """Write the files that show no steps; return their paths."""
        found = [
            (self._files.profile, settled.workload.save),
            (self._files.cluster, settled.cluster.save),
            (self._files.plan, settled.plan.save),
        ]
        if settled.record is not None:
            found.append((self._files.tuning, settled.record.save))
        return [
            path for path, write in found if path is not None and _write(path, write)
        ]

    def unfinished(self, so_far: TuningResult | None) -> str:
        """Write what is known when the run ends before tuning has settled.

        Returns: A few words on what became of each file; empty if none was requested.
        There is no trace, because no step after settling was recorded.
        """
        files = self._files
        wanted = [files.profile, files.cluster, files.plan, files.tuning, files.report]
        written: list[str] = []
        if so_far is not None:
            written = self._save(so_far)
            page = _unrecorded(
                self._title, so_far, "The run ended before tuning had settled."
            )
            if _write(files.report, lambda path: save(path, page)):
                written.append(str(files.report))
        missing = [path for path in [*wanted, files.trace] if path is not None]
        missing = [path for path in missing if path not in written]
        self.done = True
        said = []
        if written:
            said.append(f"this is in {', '.join(written)}")
        if missing:
            said.append(f"not written: {', '.join(missing)}")
        return "; ".join(said)

    def end(self) -> None:
        """Finish when the run ends, on rank 0 only, without waiting for others.

        If the run ended before enough steps were recorded, its report shows the settled
        plan.
        """
        if self.done or not self._files.of_steps:
            return
        missing = [self._files.trace]
        why = f"the run ended before {RECORDED_STEPS} steps were recorded"
        if self._settled is None:
            missing.append(self._files.report)
        else:
            page = _unrecorded(self._title, self._settled, f"T{why[1:]}.")
            _write(self._files.report, lambda path: save(path, page))
        lost = [path for path in missing if path is not None]
        if lost:
            _log.warning("not written: %s: %s", ", ".join(lost), why)

    def before_forward(self, model: DistributedDataParallel) -> None:
        """Record the steps after settling, and write them once there are enough.

        Every rank must call this before the same forwards. A thread gathers and writes
        the records; the process may end its training meanwhile.
        """
        if not self._files.of_steps:
            self.done = True
            return
        if self._recorder is None or self._gathering is None:
            device = next((p.device for p in model.parameters()), None)
            self._recorder = Recorder(keep=RECORDED_STEPS, device=device)
            ranks = ranks_of(model.process_group, timeout_s=None)
            self._gathering = RecordGathering(ranks)
            self._gathering.begin()
            model._observe(self._recorder)  # noqa: SLF001
            return
        self._seen += 1
        if self._seen <= RECORDED_STEPS:
            return
        model._observe(None)  # noqa: SLF001
        self.done = True
        plan = model._own_plan  # noqa: SLF001
        subject = _Subject(title=self._title, plan=plan, settled=self._settled)
        gathered = partial(_keep, self._files, subject, self._recorder)
        self._gathering.finish(partial(_marks, self._recorder), gathered)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the files are written; return whether they are."""
        return self._gathering is None or self._gathering.wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """Collect the report's facts about the model, while training is stopped."""

    title: str
    plan: Plan | None
    settled: TuningResult | None


def title_of(model: DistributedDataParallel) -> str:
    """Return the title of the report on a model's run."""
    ranks = dist.get_world_size(model.process_group)
    return f"{type(model.module).__name__} on {ranks} ranks"


def _marks(recorder: Recorder) -> tuple[StepMarks, ...]:
    return tuple(step for step, _ in recorder.steps)


def _keep(
    files: Files,
    subject: _Subject,
    recorder: Recorder,
    records: dict[int, RankRecord],
    missing: list[int],
) -> None:
    """Write trace and report, in the gathering thread."""
    if recorder.timeline is None:
        _log.warning("no backward was recorded: no trace and no report are written")
        return
    report = _report(subject, recorder, records, missing)
    _write(files.trace, lambda path: save_trace(path, report))
    _write(files.report, lambda path: save(path, report))


def _report(
    subject: _Subject,
    recorder: Recorder,
    records: dict[int, RankRecord],
    missing: list[int],
) -> RunReport:
    timelines = recorder.timelines
    ends_s = [timeline.end_s for timeline in timelines]
    middle = sorted(range(len(ends_s)), key=ends_s.__getitem__)[len(ends_s) // 2]
    buckets = {step.number: rows for step, rows in recorder.steps}
    method = MethodResult(
        name="stretto",
        predicted_step_s=None,
        measured_step_s=statistics.median(ends_s),
        spread_s=(max(ends_s) - min(ends_s)) / 2,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
        steps=tuple(ends_s),
        measured=timelines[middle],
        ranks=merged_timeline("stretto", records, buckets),
        plan=subject.plan,
    )
    notes = [
        (
            f"Times cover {len(ends_s)} steps on rank 0, from the start of forward to "
            "the end of communication. They exclude the optimizer and the input "
            "pipeline."
        )
    ]
    if missing:
        left = ", ".join(map(str, missing))
        notes.append(
            f"No record arrived from rank{'s' if len(missing) > 1 else ''} {left} "
            f"within {GATHER_S:g} s: the drawing of all ranks is missing."
        )
    return _with(subject.settled, _page(subject.title, method, notes), inside=True)


def _unrecorded(title: str, found: TuningResult, note: str) -> RunReport:
    """Make a report without measured timelines, of the plan, model and trials known."""
    method = MethodResult(
        name="stretto",
        predicted_step_s=None,
        measured_step_s=found.step_s,
        spread_s=None,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
        plan=found.executed,
    )
    return _with(found, _page(title, method, [note]), inside=False)


def _page(title: str, method: MethodResult, notes: Sequence[str]) -> RunReport:
    return RunReport(
        title=title,
        methods=(method,),
        environment={"stretto": __version__, "torch": str(torch.__version__)},
        notes=tuple(notes),
    )


def _with(found: TuningResult | None, report: RunReport, *, inside: bool) -> RunReport:
    """Make a report of the measurement, the decision, and the plan's predicted step.

    ``inside`` leaves out of that step what is outside the model, as the report's
    measured steps do.
    """
    if found is None:
        return report
    step = simulate_step(found.workload, found.cluster, found.executed)
    outside_s = float(found.workload.provenance.get("outside_s", 0.0)) * inside
    (method,) = report.methods
    return replace(
        report,
        workload=found.workload,
        cluster=found.cluster,
        bound_s=found.bound_s,
        tuning=found.record,
        methods=(
            replace(
                method,
                predicted_step_s=max(0.0, step.iteration_s - outside_s),
                predicted=step.timeline,
            ),
        ),
    )


def _write(path: str | None, write: Callable[[str], None]) -> bool:
    """Write a requested file; log a failure, which must not end the training."""
    if path is None:
        return False
    try:
        write(path)
    except SpecError as exc:
        _log.warning("%s: not written: %s", path, exc)
        return False
    return True
