"""Convert timelines to Chrome trace events and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema._convert import convert
from stretto.schema._json import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.schema.timeline import Span, Timeline

_NS_PER_S = 1e9
_NS_PER_US = 1e3


def trace_events(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Return Chrome trace events of several timelines, one process each, by label.

    In a timeline of several ranks, each rank is a process. Times are in microseconds,
    as the format requires, rounded to nanoseconds; ``track``, ``start_s`` and
    ``end_s`` repeat them exactly. Viewers nest spans that overlap on one thread, so
    overlapping spans of one track get separate threads, and waits are kept apart from
    sends.

    Raises:
        SpecError: a span's ``args`` hold a value that no file can hold.
    """
    events: list[dict[str, Any]] = []
    # Number from 1: viewers take process 0 and thread 0 for the idle task.
    pid = tid = 0
    for label, timeline in timelines.items():
        pids: dict[int | None, int] = {}
        tids: dict[tuple[int | None, str], int] = {}
        for rank in timeline.ranks or (None,):
            pids[rank] = pid = pid + 1
            events += _process_events(label, rank, pid)
        if any(span.rank is None for span in timeline.spans) and None not in pids:
            pids[None] = pid = pid + 1
            events += _process_events(label, None, pid)
        rows = _rows(timeline)
        owned = zip((span.rank for span in timeline.spans), rows, strict=True)
        for rank, row in dict.fromkeys(sorted(owned, key=_owned_order)):
            tid += 1
            tids[rank, _row_name(row)] = tid
            thread = {"ph": "M", "pid": pids[rank], "tid": tid}
            args = {"name": _row_name(row)}
            events.append(thread | {"name": "thread_name", "args": args})
            order = {"sort_index": tid}
            events.append(thread | {"name": "thread_sort_index", "args": order})
        for i, (span, row) in enumerate(zip(timeline.spans, rows, strict=True)):
            start_ns = round(span.start_s * _NS_PER_S)
            end_ns = round(span.end_s * _NS_PER_S)
            events.append(
                {
                    "ph": "X",
                    "pid": pids[span.rank],
                    "tid": tids[span.rank, _row_name(row)],
                    "name": span.name,
                    "ts": start_ns / _NS_PER_US,
                    "dur": (end_ns - start_ns) / _NS_PER_US,
                    "track": span.track,
                    "start_s": float(span.start_s),
                    "end_s": float(span.end_s),
                    "args": plain(span.args, label, f"$.spans[{i}].args"),
                }
            )
    return events


def _process_events(label: str, rank: int | None, pid: int) -> list[dict[str, Any]]:
    """Return the process events of a timeline, or of one rank in it."""
    process = {"ph": "M", "pid": pid}
    args: dict[str, Any] = {"name": label}
    if rank is not None:
        args = {"name": f"{label}, rank {rank}", "rank": rank, "timeline": label}
    return [
        process | {"name": "process_name", "args": args},
        process | {"name": "process_sort_index", "args": {"sort_index": pid}},
    ]


@dataclass(frozen=True, kw_only=True)
class _SpanEvent:
    """A complete event of a trace that stretto wrote."""

    ph: str
    pid: int
    tid: int
    name: str
    ts: float
    dur: float
    track: str
    start_s: float
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Require that the two forms of the times agree, to 2 ns."""
        for name, want_s, have_us in (
            ("ts", self.start_s, self.ts),
            ("dur", self.end_s - self.start_s, self.dur),
        ):
            slack_us = 2e-3 + 1e-9 * abs(have_us)
            if not abs(want_s * _NS_PER_S / _NS_PER_US - have_us) <= slack_us:
                raise SpecError(
                    f"{name} must agree with start_s {self.start_s!r} and end_s "
                    f"{self.end_s!r}, got {have_us!r}",
                    place=f".{name}",
                )


def take_timelines(body: dict[str, Any], source: str) -> dict[str, Timeline]:
    """Return the timelines in the trace events, which must be all the body holds."""
    from stretto.schema.timeline import Span, Timeline

    events = body.pop("traceEvents", None)
    if not isinstance(events, list):
        raise SpecError(
            f"{source}: $.traceEvents: must be a list", place="$.traceEvents"
        )
    if body.pop("displayTimeUnit", "ms") != "ms":
        raise SpecError(
            f"{source}: $.displayTimeUnit: must be 'ms'", place="$.displayTimeUnit"
        )
    for key in body:
        raise SpecError(
            f"{source}: $.{key}: is an unknown key; known are displayTimeUnit, "
            "traceEvents and, with one timeline, name",
            place=f"$.{key}",
        )
    processes: dict[int, tuple[str, int | None]] = {}
    spans: dict[str, list[Span]] = {}
    for i, event in enumerate(events):
        at = f"$.traceEvents[{i}]"
        if isinstance(event, dict) and event.get("ph") == "M":
            if event.get("name") == "process_name":
                pid, label, rank = _process_of(event, source, at)
                if pid in processes or (label, rank) in processes.values():
                    raise SpecError(
                        f"{source}: {at}: duplicate process {pid} {label!r}",
                        place=at,
                    )
                processes[pid] = (label, rank)
                spans.setdefault(label, [])
            continue
        if not isinstance(event, dict) or event.get("ph") != "X":
            raise SpecError(
                f"{source}: {at}: must be a complete event or metadata that stretto "
                f"wrote, got {event!r:.80}",
                place=at,
            )
        found = convert(event, _SpanEvent, source=source, place=at)
        if found.pid not in processes:
            raise SpecError(
                f"{source}: {at}.pid: no process_name event before names process "
                f"{found.pid}",
                place=f"{at}.pid",
            )
        plain = {
            key: getattr(found, key)
            for key in ("track", "name", "start_s", "end_s", "args")
        }
        label, rank = processes[found.pid]
        span: Span = convert(plain, Span, source=source, place=at)
        if span.rank != rank:
            raise SpecError(
                f"{source}: {at}.args.rank: must be that of process {found.pid}, "
                f"{rank}, got {span.rank}",
                place=f"{at}.args.rank",
            )
        spans[label].append(span)
    return {
        label: Timeline(name=label, spans=tuple(found))
        for label, found in spans.items()
    }


def _process_of(
    event: dict[str, Any], source: str, at: str
) -> tuple[int, str, int | None]:
    """Return the number, timeline and rank of a process."""
    args, pid = event.get("args"), event.get("pid")
    label = rank = None
    if isinstance(args, dict):
        rank = args.get("rank")
        label = args.get("name" if rank is None else "timeline")
    if not isinstance(label, str) or type(pid) is not int:
        raise SpecError(
            f"{source}: {at}: must name a process, got {event!r:.80}", place=at
        )
    if rank is not None and type(rank) is not int:
        raise SpecError(
            f"{source}: {at}.args.rank: must be a whole number, got {rank!r}",
            place=f"{at}.args.rank",
        )
    return pid, label, rank


def _rows(timeline: Timeline) -> list[tuple[int, str, bool, int]]:
    """Return the row of each span, so that no two spans of one row overlap.

    A row is (order of its track, track, whether it holds waits, number).
    """
    order = {track: i for i, track in enumerate(timeline.tracks)}
    rows: list[tuple[int, str, bool, int]] = [(0, "", False, 0)] * len(timeline.spans)
    ends_s: dict[tuple[int | None, str, bool], list[float]] = {}
    spans = timeline.spans
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, i)):
        span = spans[i]
        # A wait for another rank comes before the send, never beside another span.
        waits = span.args.get("kind") == "wait"
        busy_s = ends_s.setdefault((span.rank, span.track, waits), [])
        for number, end_s in enumerate(busy_s):
            if end_s <= span.start_s:
                busy_s[number] = span.end_s
                break
        else:
            number = len(busy_s)
            busy_s.append(span.end_s)
        rows[i] = (order[span.track], span.track, waits, number)
    return rows


def _owned_order(
    owned: tuple[int | None, tuple[int, str, bool, int]],
) -> tuple[bool, int, tuple[int, bool, int]]:
    rank, row = owned
    return rank is None, rank or 0, _row_order(row)


def _row_order(row: tuple[int, str, bool, int]) -> tuple[int, bool, int]:
    order, _, waits, number = row
    return order, waits, number


def _row_name(row: tuple[int, str, bool, int]) -> str:
    _, track, waits, number = row
    return track + (" waiting" if waits else "") + (f" ({number + 1})" * (number > 0))
