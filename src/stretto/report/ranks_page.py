"""A page's section about all ranks: drawing, figures, meanings of spans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.report.ranks import PARTS, find_late
from stretto.report.svg import DrawnLine, lines_svg
from stretto.schema import Timeline
from stretto.units import format_s

if TYPE_CHECKING:
    from stretto.report.ranks import RanksFound

MAX_DRAWN = 12
"""Number of ranks drawn; if there are more, the latest ones and the earliest."""

_DASH = "–"

MEANINGS = {
    "forward": "the model computes its output",
    "backward": "the model computes its gradients; buckets leave as they fill",
    "between steps": (
        "optimizer, loading of the next batch, and everything else between the end of "
        "one step's communication and the next forward"
    ),
    "waits for rank N": (
        "this rank has all its gradients, but rank N does not: the time that rank N "
        "costs the others"
    ),
    "waits for communication": (
        "all ranks have all their gradients but the network still moves them: a "
        "better plan can hide this"
    ),
    "bucket N slice 1/2": "a part of bucket N on the wire",
    "wait bucket N": (
        "bucket N is full, but its lane still sends what was launched before it"
    ),
    "bucket N waits for rank M": (
        "bucket N is full here, but rank M has not filled it: a collective starts with "
        "its last rank"
    ),
}
"""The meaning of each span of a drawing."""


def drawn_ranks(found: RanksFound) -> tuple[int, ...]:
    """Return the ranks that a drawing shows, in order."""
    if len(found.ranks) <= MAX_DRAWN:
        return tuple(row.rank for row in found.ranks)
    by_lateness = sorted(found.ranks, key=lambda row: (-row.late_s, row.rank))
    latest = by_lateness[: MAX_DRAWN - 4]
    return tuple(sorted(row.rank for row in (*latest, *by_lateness[-4:])))


def ranks_svg(name: str, timeline: Timeline, found: RanksFound) -> str:
    """Draw the median step of the ranks, above each other on one clock."""
    late = {row.rank for row in found.late}
    step = Timeline(
        name=timeline.name,
        spans=tuple(
            s for s in timeline.spans if s.args.get("step", 0) == found.typical
        ),
    )
    origin_s = min(span.start_s for span in step.spans)
    moved = Timeline(
        name=step.name,
        spans=tuple(
            replace(s, start_s=s.start_s - origin_s, end_s=s.end_s - origin_s)
            for s in step.spans
        ),
    )
    by_rank = {row.rank: row for row in found.ranks}
    lines = [
        DrawnLine(
            name=f"rank {rank}",
            note=f"late by {format_s(by_rank[rank].late_s)}" if rank in late else "",
            line=moved.of_rank(rank),
            marked=rank in late,
        )
        for rank in drawn_ranks(found)
    ]
    return lines_svg(f"all ranks, {name}", lines, shared_end_s=0.0)


def rank_rows(found: RanksFound) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """Return heads and rows of the table of ranks; each row with whether it is late."""
    heads = [
        "rank",
        "forward",
        "backward",
        "between steps",
        "exposed communication",
        "of it waiting for others",
        "late by",
        "mostly in",
        "clock known within",
    ]
    late = {row.rank for row in found.late}
    rows = [
        (
            [
                str(row.rank),
                format_s(row.forward_s),
                format_s(row.backward_s),
                _DASH if row.outside_s is None else format_s(row.outside_s),
                format_s(row.exposed_s),
                format_s(row.peer_s),
                format_s(max(0.0, row.late_s)),
                PARTS[row.part] if row.rank in late else _DASH,
                format_s(row.clock_error_s) if row.clock_error_s else "same clock",
            ],
            row.rank in late,
        )
        for row in found.ranks
    ]
    return heads, rows


def lane_rows(found: RanksFound) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """Return heads and rows of the table of lanes; each row with whether it is slow."""
    heads = ["lane", "sends for", "ends after the slowest backward"]
    rows = [
        (
            [lane.track, format_s(lane.send_s), format_s(lane.tail_s)],
            lane == found.slow_lane,
        )
        for lane in found.lanes
    ]
    return heads, rows


def summary(timeline: Timeline) -> str | None:
    """Return the finding in words; ``None`` if no step shows all ranks."""
    found = find_late(timeline)
    return None if found is None else found.words()
