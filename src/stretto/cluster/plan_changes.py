"""Change the plan of a running job, for its `supervisor`: `replanning` decides."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from stretto import variable_names
from stretto.cluster import job_replan
from stretto.cluster.part_spec import (
    ReplanSpec,
    base_environment,
)
from stretto.cluster.replanning import Change, Measure, Replanning
from stretto.lab import syscalls
from stretto.plan_requests import (
    CHANGE,
    CHANGED,
    MEASURE,
    MEASURED,
    REFUSED,
    PlanRequest,
    RequestFolder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NICE = 19
"""The niceness of the planner, which runs beside the job's ranks."""


@final
class PlanChanges:
    """Asks rank 0 for its layers' times, plans again, and asks for another plan."""

    def __init__(
        self, folder: Path, spec: ReplanSpec, report: Callable[..., None]
    ) -> None:
        """Create the folder of the requests.

        Args:
            folder: of requests and reports.
            spec: what the plan was made from.
            report: called with the data of each change.

        Raises:
            OSError: the folder or the plan cannot be read.
        """
        self._folder, self._spec, self._report = folder, spec, report
        self._requests = RequestFolder(folder)
        self._requests.create()
        self._replanning = Replanning(Path(spec.plan).read_text())
        self._number = 0
        self._steps = 0
        self._planner: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process of the planner while it runs."""
        return None if self._planner is None else self._planner.pid

    def look(self, step: Mapping[str, Any] | None) -> None:
        """Take in a report of steps, if there is one, and the job's own reports."""
        for row in self._requests.reports():
            self._on_report(row)
        if step is None or "idle_s" in step:
            return
        self._steps = step["step"]
        self._act(self._replanning.step(step["step"], step["step_s"]))

    def planner_ended(self) -> None:
        """Take in the planner's answer."""
        if self._planner is None:
            return
        self._planner.returncode = 0  # it was waited for
        self._planner = None
        found = job_replan.read_answer(self._folder)
        self._act(self._replanning.planned(None if isinstance(found, str) else found))

    def _on_report(self, row: Mapping[str, Any]) -> None:
        kind = row.get("kind")
        if row["number"] != self._number:
            return
        if kind == MEASURED and self._replanning.measured():
            self._plan(row.get("timings"))
        elif kind == CHANGED:
            self._on_changed(row)
        elif kind == REFUSED:
            self._replanning.refused()

    def _on_changed(self, row: Mapping[str, Any]) -> None:
        took_s = row.get("took_s")
        took_s = float(took_s) if isinstance(took_s, int | float) else 0.0
        change = self._replanning.changed(took_s)
        if change is None:
            return
        self._report(
            step=self._steps,
            step_s=change.step_s,
            predicted_s=change.predicted_s,
            took_s=took_s,
            why=change.why,
        )

    def _act(self, found: Measure | Change | None) -> None:
        if found is None:
            return
        self._number += 1
        if isinstance(found, Measure):
            request = PlanRequest(number=self._number, kind=MEASURE, steps=found.steps)
        else:
            request = PlanRequest(number=self._number, kind=CHANGE, plan=found.plan)
        try:
            self._requests.write(request)
        except OSError:  # a full disk
            self._replanning.refused()

    def _plan(self, timings: Any) -> None:
        """Start the planner."""
        question = {
            "plan": self._replanning.plan,
            "profile": self._spec.profile,
            "network": self._spec.network,
            "amplification_limit": self._spec.amplification_limit,
            "timings": timings,
        }
        mark = {variable_names.CLUSTER_ATTEMPT: str(self._folder.parent)}
        try:
            self._planner = subprocess.Popen(
                job_replan.ask(self._folder, question),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=base_environment() | mark | {"OMP_NUM_THREADS": "1"},
                preexec_fn=functools.partial(_before_exec, os.getpid()),
            )
        except OSError:
            self._replanning.planned(None)


def _before_exec(parent: int) -> None:
    syscalls.die_with(parent)
    os.nice(_NICE)
