"""Traces of real clusters as jobs: Philly, Helios, PAI 2020, Alibaba spot-gpu 2026.

No trace names the models of its jobs: `replay.jobs_of` draws a model of the zoo for
each by a seed. Durations are those on the trace's own hardware, so a job's work is its
duration times its speed, here, on the number of devices that it had there.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stretto.errors import SpecError
from stretto.schema import codec
from stretto.schema.job import BACKGROUND, FOREGROUND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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


_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
}
"""First bytes of compressed files, as which traces are published."""

_MISSING = (None, "", "None")

_MAX_GPUS = 1_000_000
_MAX_S = 1e12
"""Limit of times and durations: beyond all dates, and sums are exact enough."""

_Value = TypeVar("_Value")


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
    """Rows without GPUs, a submission, a start or an end, or that lasted no time."""


def load_trace(path: str | Path, *, max_jobs: int | None = None) -> Trace:
    """Return the jobs of a trace file, whose format is found from its columns.

    Raises:
        SpecError: it cannot be read, or has no known format or no job.
    """
    text = _text(path)
    if text.lstrip()[:1] == "{":
        raise SpecError(
            f"{path}: is {_object_kind(text, str(path))}, and no trace: traces are "
            "Philly's JSON list, or CSV of Helios, PAI or Alibaba's spot-gpu"
        )
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


def _object_kind(text: str, source: str) -> str:
    """Return what a JSON object is: a file of stretto says its kind."""
    kind = codec.parse(text.encode(), source).get("kind")
    return f"a file of kind {kind!r:.80}" if isinstance(kind, str) else "a JSON object"


def _text(path: str | Path) -> str:
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise SpecError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    for begin, name in _PACKED.items():
        if data.startswith(begin):
            raise SpecError(f"{path}: is compressed with {name}: unpack it first")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise SpecError(
            f"{path}: is not UTF-8 text: {exc}: convert it, for instance with iconv"
        ) from exc


def _from_csv(text: str, source: str) -> tuple[str, Iterator[TraceJob | None]]:
    try:
        columns = next(csv.reader(io.StringIO(text, newline="")), [])
    except csv.Error as exc:
        raise SpecError(f"{source}: line 1: {exc}") from exc
    if len(columns) == len(_PAI_COLUMNS) and not set(_PAI_COLUMNS) & set(columns):
        return "pai", _pai(_table(text, list(_PAI_COLUMNS)), source)  # no header
    for column in columns:
        if column and columns.count(column) > 1:
            raise SpecError(f"{source}: line 1: column {column!r} is a duplicate")
    for name, needed, convert in _FORMATS:
        if needed <= set(columns):
            return name, _rows(_table(text), convert, source)
    if set(_PAI_COLUMNS) <= set(columns):
        return "pai", _pai(_table(text), source)
    if not columns:
        raise SpecError(f"{source}: is empty")
    raise SpecError(
        f"{source}: unknown kind of trace: known are Philly's JSON list, and CSV with "
        "the columns of Helios (gpu_num, submit_time, duration), of PAI's task table "
        "(plan_gpu, inst_num) or of Alibaba's spot-gpu (job_type, gpu_request, "
        f"worker_num); its columns are {', '.join(columns[:12])}"
    )


def _table(text: str, columns: list[str] | None = None) -> csv.DictReader[str]:
    return csv.DictReader(io.StringIO(text, newline=""), fieldnames=columns)


_Row = dict[str, str]
"""Fields by column; one that a row lacks is empty."""


def _checked(
    table: csv.DictReader[str], source: str, use: Callable[[_Row], _Value]
) -> Iterator[_Value]:
    """Yield what a function makes of each row; errors name the line."""
    try:
        for row in table:
            yield use(_fields(row))
    except (ValueError, csv.Error) as exc:
        raise SpecError(f"{source}: line {table.reader.line_num}: {exc}") from exc


def _fields(row: Mapping[Any, Any]) -> _Row:
    if None in row:  # a comma too many: columns may be shifted
        raise ValueError("has more fields than there are columns")
    return {k: v if isinstance(v, str) else "" for k, v in row.items()}


def _rows(
    table: csv.DictReader[str], convert: Callable[[_Row], TraceJob | None], source: str
) -> Iterator[TraceJob | None]:
    yield from _checked(table, source, convert)


def _spot(row: _Row) -> TraceJob | None:
    """Alibaba spot-gpu 2026: HP is the foreground, Spot the background."""
    gpus = _count(row, "gpu_request") * _count(row, "worker_num")
    role = {"HP": FOREGROUND, "Spot": BACKGROUND}.get(row["job_type"].strip())
    if role is None:
        raise ValueError(f"job_type must be HP or Spot, got {row['job_type']!r:.80}")
    submit_s = _time(row, "submit_time")
    return _job(submit_s, gpus, _number(row, "duration"), role)


def _helios(row: _Row) -> TraceJob | None:
    submit_s = _time(row, "submit_time")
    return _job(submit_s, _count(row, "gpu_num"), _number(row, "duration"))


_FORMATS: tuple[tuple[str, set[str], Callable[[_Row], TraceJob | None]], ...] = (
    (
        "spot-gpu",
        {"job_type", "gpu_request", "worker_num", "submit_time", "duration"},
        _spot,
    ),
    ("helios", {"gpu_num", "submit_time", "duration"}, _helios),
)


def _pai(table: csv.DictReader[str], source: str) -> Iterator[TraceJob | None]:
    """PAI 2020: the tasks of a job run together; GPUs are in percent of one.

    The table has no submission, so a job counts as submitted when its first task
    started.
    """
    tasks: dict[str, list[tuple[float, float, float]]] = {}
    skipped = 0
    for name, start_s, end_s, gpus in _checked(table, source, _task):
        if start_s is None or end_s is None or gpus <= 0:
            skipped += 1
        else:
            tasks.setdefault(name, []).append((start_s, end_s, gpus))
    for name, rows in tasks.items():
        first_s = min(row[0] for row in rows)
        last_s = max(row[1] for row in rows)
        gpus = sum(row[2] for row in rows) - 1e-9
        try:
            yield _job(first_s, gpus, last_s - first_s)
        except ValueError as exc:
            raise SpecError(f"{source}: {name:.80}: {exc}") from exc
    for _ in range(skipped):
        yield None


def _task(row: _Row) -> tuple[str, float | None, float | None, float]:
    """Return a task's job, its start and end, if it has them, and its GPUs."""
    gpus = _count(row, "inst_num") * _count(row, "plan_gpu") / 100
    return row["job_name"], _time(row, "start_time"), _time(row, "end_time"), gpus


def _philly(text: str, source: str) -> Iterator[TraceJob | None]:
    """Philly: the duration is that of the last attempt with both times."""
    rows = codec.parse_any(text.encode(), source)
    for number, row in enumerate(rows):
        try:
            yield _philly_job(row)
        except KeyError as exc:
            raise SpecError(f"{source}: $[{number}]: lacks {exc}") from exc
        except (TypeError, AttributeError) as exc:
            raise SpecError(
                f"{source}: $[{number}]: is not a job of Philly's, which has "
                "submitted_time, and attempts with start_time, end_time and detail"
            ) from exc
        except ValueError as exc:
            raise SpecError(f"{source}: $[{number}]: {exc}") from exc


def _philly_job(row: Mapping[str, Any]) -> TraceJob | None:
    found: TraceJob | None = None
    for attempt in row["attempts"]:
        start_s, end_s = _time(attempt, "start_time"), _time(attempt, "end_time")
        if start_s is None or end_s is None:
            continue
        gpus = sum(_length(part["gpus"]) for part in attempt["detail"])
        found = _job(_time(row, "submitted_time"), gpus, end_s - start_s)
    return found


def _length(gpus: object) -> int:
    if not isinstance(gpus, list):  # the length of text is not a number of GPUs
        raise TypeError
    return len(gpus)


def _job(
    submit_s: float | None, gpus: float, duration_s: float, role: str | None = None
) -> TraceJob | None:
    """Return a job, or ``None`` if it was not submitted, or used no GPU or no time."""
    if submit_s is None or gpus <= 0 or duration_s <= 0:
        return None
    if gpus > _MAX_GPUS:
        raise ValueError(f"a job with {gpus:g} GPUs: no cluster has them")
    if max(abs(submit_s), duration_s) > _MAX_S:
        raise ValueError(
            f"a job submitted at {submit_s:g} s that lasts {duration_s:g} s: times "
            f"have at most {_MAX_S:g} s"
        )
    return TraceJob(
        submit_s=submit_s, gpus=math.ceil(gpus), duration_s=duration_s, role=role
    )


def _number(row: _Row, name: str) -> float:
    """Return a row's number; 0 if it has none."""
    text = row[name]
    if text in _MISSING:
        return 0.0
    found = _finite(text)
    if found is None:
        raise ValueError(f"{name} must be a finite number, got {text!r:.80}")
    return found


def _count(row: _Row, name: str) -> float:
    """Return a row's number of something; 0 if it has none."""
    found = _number(row, name)
    if found < 0:
        raise ValueError(f"{name} must be >= 0, got {found:g}")
    return found


def _time(row: Mapping[str, Any], name: str) -> float | None:
    """Return seconds of a number or of a date such as ``2017-10-03 09:15:00``."""
    text = row.get(name)
    if text in _MISSING:
        return None
    text = str(text).strip()
    found = _finite(text)
    if found is None:
        try:
            date = datetime.fromisoformat(text)
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            found = date.timestamp()
        except ValueError as exc:
            raise ValueError(
                f"{name} must be seconds or a date such as 2017-10-03 09:15:00, got "
                f"{text!r:.80}"
            ) from exc
    return found


def _finite(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
