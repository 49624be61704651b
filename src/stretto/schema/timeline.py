"""Named spans on named tracks, one type for predicted and measured times."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema import rules
from stretto.schema._convert import convert
from stretto.schema._json import dump, parse, plain
from stretto.schema.codec import header, read, take_header, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One named interval of time."""

    track: str
    """``compute``, ``lane0``, ``lane1``, ..."""

    name: str

    start_s: float
    """From the start of the timeline."""

    end_s: float

    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules.not_empty(".track", self.track)
        rules.finite(".start_s", self.start_s)
        rules.finite(".end_s", self.end_s)
        if self.end_s < self.start_s:
            raise SpecError(
                f"end_s must be >= start_s ({self.start_s:g}), got {self.end_s:g}",
                place=".end_s",
            )

    @property
    def duration_s(self) -> float:
        """Length of the span."""
        return self.end_s - self.start_s

    @property
    def rank(self) -> int | None:
        """Rank of the span; ``None`` in a timeline of one rank."""
        rank = self.args.get("rank")
        return rank if type(rank) is int else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of one step, measured or predicted.

    A bucket that waits for its lane has a span named ``wait ...`` on the lane's track
    with ``args["kind"] == "wait"``; its collective has ``args["kind"] == "send"``.
    Computation has ``args["kind"]`` ``forward`` or ``backward``.

    A timeline of several ranks has the rank of each span in ``args["rank"]`` and may
    hold several steps, with each span's step in ``args["step"]``. It has three further
    kinds: ``peer`` (waits for another rank, ``args["waits_for"]``), ``exposed``
    (backward has been computed and communication still runs) and ``outside`` (between
    two steps).
    """

    name: str

    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        """End of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def tracks(self) -> tuple[str, ...]:
        """Track names, computation first, lanes by number, others by name."""
        return tuple(sorted({span.track for span in self.spans}, key=_track_order))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose spans it holds; empty if the spans have no rank."""
        return tuple(sorted({r for span in self.spans if (r := span.rank) is not None}))

    def of_rank(self, rank: int, *, step: int | None = None) -> Timeline:
        """Return the spans of one rank, of all steps or of one."""
        return Timeline(
            name=self.name,
            spans=tuple(
                span
                for span in self.spans
                if span.rank == rank and (step is None or span.args.get("step") == step)
            ),
        )

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Return the timeline in a Chrome trace that `save` wrote.

        Raises:
            SpecError: the file breaks a rule; the message names file and place.
        """
        return load_timeline(path)

    def save(self, path: str | Path) -> None:
        """Write the timeline atomically, as Chrome trace events."""
        save_timeline(path, self)


def _track_order(track: str) -> tuple[int, int, str]:
    if track == "compute":
        return (0, 0, "")
    if track.startswith("lane") and track[4:].isdigit():
        return (1, int(track[4:]), "")
    return (2, 0, track)


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


def load_timeline(path: str | Path) -> Timeline:
    """Return the timeline in a Chrome trace written by `save_timeline`.

    Raises:
        SpecError: the file cannot be read or breaks a rule.
    """
    source = str(path)
    body = parse(read(path), source)
    take_header(body, "timeline", source)
    name = body.pop("name", None)
    timelines = take_timelines(body, source)
    if not isinstance(name, str):
        raise SpecError(f"{source}: $.name: must be text, got {name!r}", place="$.name")
    if len(timelines) != 1:
        raise SpecError(
            f"{source}: $.traceEvents: must hold one timeline, got {len(timelines)}",
            place="$.traceEvents",
        )
    return dataclasses.replace(*timelines.values(), name=name)


def save_timeline(path: str | Path, timeline: Timeline) -> None:
    """Write a timeline as Chrome trace events that Perfetto opens.

    Raises:
        SpecError: the file cannot be written.
    """
    body = {
        "name": timeline.name,
        "displayTimeUnit": "ms",
        "traceEvents": trace_events({timeline.name: timeline}),
    }
    write_atomically(path, dump(header("timeline") | body))


def load_timelines(path: str | Path) -> dict[str, Timeline]:
    """Return the timelines in a trace written by `save_timelines`, by label.

    Each has its label as its name.

    Raises:
        SpecError: the file cannot be read or breaks a rule.
    """
    source = str(path)
    body = parse(read(path), source)
    take_header(body, "trace", source)
    return take_timelines(body, source)


def save_timelines(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write several timelines as one Chrome trace, one process per timeline or rank.

    Raises:
        SpecError: the file cannot be written.
    """
    body = {"displayTimeUnit": "ms", "traceEvents": trace_events(timelines)}
    write_atomically(path, dump(header("trace") | body))
