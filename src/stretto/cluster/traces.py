"""Traces of real clusters as jobs: Philly, Helios, PAI 2020, Alibaba spot-gpu 2026.

No trace names the models of its jobs: `replay.jobs_of` draws a model of the zoo for
each by a seed. Durations are those on the trace's own hardware, so a job's work is its
duration times its speed, here, on the number of devices that it had there.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema.job import BACKGROUND, FOREGROUND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_PAI_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a trace."""

    submit_s: float
    """Since the trace's first submission."""

    gpus: int

    duration_s: float

    role: str | None
    """``None``: the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The jobs of a trace, by time of submission."""

    format: str

    jobs: tuple[TraceJob, ...]

    skipped: int
    """Rows that are no job with GPUs, a start and an end."""


def load_trace(path: str | Path, *, max_jobs: int | None = None) -> Trace:
    """Return the jobs of a trace file, whose format is found from its columns.

    Raises:
        SpecError: it cannot be read, or has no known format or no job.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"{path}: cannot be read: {exc}") from exc
    if text.lstrip()[:1] == "[":
        name, rows = "philly", _philly(text, str(path))
    else:
        name, rows = _from_csv(text, str(path))
    found: list[TraceJob] = []
    skipped = 0
    for row in rows:
        if row is None:
            skipped += 1
        else:
            found.append(row)
    if not found:
        raise SpecError(f"{path}: has no job with GPUs, a start and an end")
    found.sort(key=lambda job: job.submit_s)
    first_s = found[0].submit_s
    jobs = tuple(
        TraceJob(
            submit_s=job.submit_s - first_s,
            gpus=job.gpus,
            duration_s=job.duration_s,
            role=job.role,
        )
        for job in found[:max_jobs]
    )
    return Trace(format=name, jobs=jobs, skipped=skipped)


def _from_csv(text: str, source: str) -> tuple[str, Iterator[TraceJob | None]]:
    lines = text.splitlines()
    columns = next(csv.reader(lines[:1]), [])
    for name, needed, convert in _FORMATS:
        if needed <= set(columns):
            return name, _rows(csv.DictReader(lines), convert, source)
    if len(columns) == len(_PAI_COLUMNS):  # as published, without a header
        table = csv.DictReader(lines, fieldnames=list(_PAI_COLUMNS))
        return "pai", _pai(table, source)
    if set(_PAI_COLUMNS) <= set(columns):
        return "pai", _pai(csv.DictReader(lines), source)
    raise SpecError(
        f"{source}: is no known trace: known are Philly's JSON list, and CSV with the "
        "columns of Helios (gpu_num, submit_time, duration), of PAI's task table "
        "(plan_gpu, inst_num) or of Alibaba's spot-gpu (job_type, gpu_request, "
        f"worker_num); its columns are {', '.join(columns[:12])}"
    )


def _rows(
    table: Iterable[Mapping[str, str]],
    convert: Callable[[Mapping[str, str]], TraceJob | None],
    source: str,
) -> Iterator[TraceJob | None]:
    for number, row in enumerate(table, 2):
        try:
            yield convert(row)
        except (ValueError, TypeError, KeyError) as exc:
            raise SpecError(f"{source}: line {number}: {exc}") from exc


def _spot(row: Mapping[str, str]) -> TraceJob | None:
    """Alibaba spot-gpu 2026: HP is the foreground, Spot the background."""
    gpus = _number(row["gpu_request"]) * _number(row["worker_num"])
    role = {"HP": FOREGROUND, "Spot": BACKGROUND}.get(row["job_type"].strip())
    if role is None:
        raise ValueError(f"job_type must be HP or Spot, got {row['job_type']!r}")
    return _job(_number(row["submit_time"]), gpus, _number(row["duration"]), role)


def _helios(row: Mapping[str, str]) -> TraceJob | None:
    return _job(
        _time(row["submit_time"]), _number(row["gpu_num"]), _number(row["duration"])
    )


_FORMATS: tuple[
    tuple[str, set[str], Callable[[Mapping[str, str]], TraceJob | None]], ...
] = (
    (
        "spot-gpu",
        {"job_type", "gpu_request", "worker_num", "submit_time", "duration"},
        _spot,
    ),
    ("helios", {"gpu_num", "submit_time", "duration"}, _helios),
)


def _pai(table: Iterable[Mapping[str, str]], source: str) -> Iterator[TraceJob | None]:
    """PAI 2020: the tasks of a job run together; GPUs are in percent of one.

    The table has no submission, so a job counts as submitted when its first task
    started.
    """
    tasks: dict[str, list[tuple[float, float, float]]] = {}
    skipped = 0
    for number, row in enumerate(table, 1):
        try:
            start, end = row["start_time"], row["end_time"]
            gpus = _number(row["inst_num"]) * _number(row["plan_gpu"]) / 100
            if start and end and gpus > 0:
                times = tasks.setdefault(row["job_name"], [])
                times.append((_number(start), _number(end), gpus))
            else:
                skipped += 1
        except (ValueError, TypeError) as exc:
            raise SpecError(f"{source}: line {number}: {exc}") from exc
    for rows in tasks.values():
        first_s = min(row[0] for row in rows)
        last_s = max(row[1] for row in rows)
        gpus = math.ceil(sum(row[2] for row in rows) - 1e-9)
        yield _job(first_s, gpus, last_s - first_s)
    for _ in range(skipped):
        yield None


def _philly(text: str, source: str) -> Iterator[TraceJob | None]:
    """Philly: the duration is that of the last attempt with both times."""
    try:
        rows = json.loads(text)
    except ValueError as exc:
        raise SpecError(f"{source}: is not JSON: {exc}") from exc
    for number, row in enumerate(rows):
        try:
            yield _philly_job(row)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise SpecError(f"{source}: $[{number}]: {exc}") from exc


def _philly_job(row: Mapping[str, Any]) -> TraceJob | None:
    found: TraceJob | None = None
    for attempt in row["attempts"]:
        start, end = attempt.get("start_time"), attempt.get("end_time")
        if start in (None, "None", "") or end in (None, "None", ""):
            continue
        gpus = sum(len(part["gpus"]) for part in attempt["detail"])
        found = _job(_time(row["submitted_time"]), gpus, _time(end) - _time(start))
    return found


def _job(
    submit_s: float, gpus: float, duration_s: float, role: str | None = None
) -> TraceJob | None:
    """Return a job, or ``None`` if it used no GPU or no time."""
    if gpus <= 0 or duration_s <= 0:
        return None
    return TraceJob(
        submit_s=submit_s, gpus=math.ceil(gpus), duration_s=duration_s, role=role
    )


def _number(text: str) -> float:
    value = float(text) if text not in (None, "", "None") else 0.0
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {text!r}")
    return value


def _time(text: str) -> float:
    """Return seconds of a number or of a date such as ``2017-10-03 09:15:00``."""
    try:
        return _number(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC).timestamp()
