"""Build a report from whatever files are available."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.report.results import (
    MethodResult,
    Results,
    RunReport,
    report_of,
    with_method,
)
from stretto.report.trace import MEASURED, PREDICTED, RANKS, split_label
from stretto.schema import Cluster, Plan, Timeline, Workload, codec
from stretto.schema.timeline import load_timelines
from stretto.schema.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterable

KINDS = ("results", "workload", "cluster", "plan", "timeline", "trace", "tuning")
"""Kinds of files that a page can show."""


def gather(paths: Iterable[str | Path], *, title: str | None = None) -> RunReport:
    """Return the report on the files' contents; each file names its own kind.

    Plans and timelines go to the method that their file name contains
    (``plan-mg-wfbp.json``, ``ddp predicted.json``) or, for a plan, to its planner. If
    there is no such method, one is added.

    Raises:
        SpecError: a file cannot be read, is not a stretto file, breaks a rule, or is
            the second of a kind that a page shows once.
    """
    by_kind: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in map(Path, paths):
        kind = codec.kind_in(path)
        if kind not in by_kind:
            raise SpecError(
                f"{path}: $.kind: must be one of {', '.join(KINDS)}, got {kind!r}",
                place="$.kind",
            )
        by_kind[kind].append(path)
    for kind in ("results", "workload", "cluster", "tuning"):
        if len(by_kind[kind]) > 1:
            raise SpecError(
                f"{by_kind[kind][1]}: a page shows one {kind} file, and "
                f"{by_kind[kind][0]} is one already; make a separate page for each"
            )
    report = RunReport(title=title or "stretto report")
    for path in by_kind["results"]:
        report = report_of(codec.load(path, Results))
        report = replace(report, title=title or report.title)
    for path in by_kind["workload"]:
        report = replace(report, workload=Workload.load(path))
    for path in by_kind["cluster"]:
        report = replace(report, cluster=Cluster.load(path))
    for path in by_kind["tuning"]:
        report = replace(report, tuning=Tuning.load(path))
    for path in by_kind["plan"]:
        report = _with_plan(report, path, Plan.load(path))
    for path in by_kind["trace"]:
        for label, timeline in load_timelines(path).items():
            report = _with_timeline(report, *split_label(label), timeline)
    for path in by_kind["timeline"]:
        timeline = Timeline.load(path)
        name, word = _name_and_word(path)
        predicted = word == PREDICTED or timeline.name.endswith(PREDICTED)
        word = PREDICTED if predicted else MEASURED
        report = _with_timeline(report, name, word, timeline)
    return report


def _with_plan(report: RunReport, path: Path, plan: Plan) -> RunReport:
    stem = path.stem.removeprefix("plan-")
    by_file = [m for m in report.methods if _plain(m.name) == _plain(stem)]
    by_planner = [m for m in report.methods if _plain(m.name) == _plain(plan.planner)]
    free = [m for m in (*by_file, *by_planner) if m.plan is None]
    name = _free_name(report, plan.planner, stem)
    method = free[0] if free else _unmeasured(name)
    method = replace(method, plan=plan)
    if plan.predicted is not None:
        if method.predicted_step_s is None:
            method = replace(method, predicted_step_s=plan.predicted.iteration_s)
        # The smallest bound holds for every method, whatever its plan's scope.
        bound_s = plan.predicted.lower_bound_s
        if report.bound_s is None or bound_s < report.bound_s:
            report = replace(
                report, bound_s=bound_s, bound_scope=plan.predicted.bound_scope
            )
    return with_method(report, method)


def _with_timeline(
    report: RunReport, name: str, word: str, timeline: Timeline
) -> RunReport:
    named = [m for m in report.methods if _plain(m.name) == _plain(name)]
    method = named[0] if named else _unmeasured(name)
    if timeline.ranks:
        return with_method(report, replace(method, ranks=timeline))
    drawn: dict[str, Any] = {word: timeline}
    return with_method(report, replace(method, **drawn))


def _name_and_word(path: Path) -> tuple[str, str]:
    """Return a timeline's method and kind from its file name; the kind may be empty."""
    for word in (PREDICTED, MEASURED, RANKS):
        for sign in " -_.":
            if path.stem.endswith(sign + word):
                return path.stem.removesuffix(sign + word), word
    return path.stem, ""


def _free_name(report: RunReport, *wanted: str) -> str:
    taken = {m.name for m in report.methods}
    for name in wanted:
        if name not in taken:
            return name
    numbers = range(2, len(taken) + 3)
    return next(
        f"{wanted[-1]} {i}" for i in numbers if f"{wanted[-1]} {i}" not in taken
    )


def _unmeasured(name: str) -> MethodResult:
    return MethodResult(
        name=name,
        predicted_step_s=None,
        measured_step_s=None,
        spread_s=None,
        speedup_over_ddp=None,
        bound_share=None,
        final_loss=None,
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", " ").replace("_", " ")
