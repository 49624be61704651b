"""What a run keeps of itself: files named by the options of `stretto run`."""

from __future__ import annotations

import logging
import os
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, final

import torch
import torch.distributed as dist

from stretto._version import __version__
from stretto.errors import SpecError
from stretto.report import DemoReport, MethodResult, save, save_trace
from stretto.runtime import Recorder
from stretto.sim.step import simulate_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stretto.runtime import DistributedDataParallel
    from stretto.tune import Settled

_log = logging.getLogger(__name__)

RECORDED_STEPS = 8
"""Steps after settling of which a trace and a report are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where to keep what; ``None``: nowhere."""

    plan: str | None = None
    profile: str | None = None
    cluster: str | None = None
    trace: str | None = None
    report: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """What the variables of `stretto run` say."""
        return cls(
            plan=environment.get("STRETTO_SAVE_PLAN"),
            profile=environment.get("STRETTO_PROFILE"),
            cluster=environment.get("STRETTO_CLUSTER"),
            trace=environment.get("STRETTO_TRACE"),
            report=environment.get("STRETTO_REPORT"),
        )


@final
class Keeper:
    """Writes the files of one run; rank 0's business alone."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._settled: Settled | None = None
        self._recorder: Recorder | None = None
        self._seen = 0
        self.done = False
        """Whether all is written."""

    @classmethod
    def of_environment(cls, rank: int) -> Keeper | None:
        """The keeper that the environment asks for, if any."""
        files = Files.of(os.environ)
        if rank != 0 or files == Files():
            return None
        return cls(files)

    def settled(self, settled: Settled) -> None:
        """Keeps what was measured and decided."""
        self._settled = settled
        for path, value in (
            (self._files.profile, settled.workload),
            (self._files.cluster, settled.cluster),
            (self._files.plan, settled.plan),
        ):
            _write(path, value.save)

    def before_forward(self, model: DistributedDataParallel) -> None:
        """Records the steps after settling and writes them once there are enough."""
        if self._files.trace is None and self._files.report is None:
            self.done = True
            return
        if self._recorder is None:
            self._recorder = Recorder(keep=RECORDED_STEPS)
            model.observe(self._recorder)
            return
        self._seen += 1
        if self._seen <= RECORDED_STEPS:
            return
        model.observe(None)
        self.done = True
        report = self._report(model, self._recorder)
        _write(self._files.trace, lambda path: save_trace(path, report))
        _write(self._files.report, lambda path: save(path, report))

    def _report(self, model: DistributedDataParallel, recorder: Recorder) -> DemoReport:
        timelines = recorder.timelines
        ends_s = [timeline.end_s for timeline in timelines]
        middle = sorted(range(len(ends_s)), key=ends_s.__getitem__)[len(ends_s) // 2]
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
            plan=model.plan,
        )
        ranks = dist.get_world_size(model.process_group)
        report = DemoReport(
            title=f"{type(model.module).__name__} on {ranks} ranks",
            methods=(method,),
            environment={"stretto": __version__, "torch": str(torch.__version__)},
            notes=(
                (
                    f"Times are of {len(ends_s)} steps on rank 0, from the start of "
                    "forward to the end of communication: the optimizer and the input "
                    "pipeline are not in them."
                ),
            ),
        )
        if self._settled is None:
            return report
        found = self._settled
        step = simulate_step(found.workload, found.cluster, found.carried_out)
        outside_s = float(found.workload.provenance.get("outside_s", 0.0))
        return replace(
            report,
            workload=found.workload,
            cluster=found.cluster,
            methods=(
                replace(
                    method,
                    predicted_step_s=max(0.0, step.iteration_s - outside_s),
                    predicted=step.timeline,
                ),
            ),
        )


def _write(path: str | None, write: Callable[[str], None]) -> None:
    """Writes a file that was asked for; one that can't be must not end the training."""
    if path is None:
        return
    try:
        write(path)
    except SpecError as exc:
        _log.warning("%s: not written: %s", path, exc)
