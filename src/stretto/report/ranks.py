"""Find late ranks: figures of every rank from a timeline of all ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stretto.schema import Span, Timeline

LATE_RATIO = 0.03
"""A rank is called late from this share of the step on; less is normal noise."""

PARTS = {
    "outside": "between steps (optimizer, input)",
    "forward": "forward",
    "loss": "between forward and backward (loss)",
    "backward": "backward",
    "communication": "the end of the communication before",
}
"""Parts of a rank's step up to its gradients, in plain words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's part of a step; medians over the recorded steps, in seconds."""

    rank: int
    forward_s: float
    backward_s: float

    outside_s: float | None
    """Between two steps; ``None`` if only single steps were recorded."""

    exposed_s: float
    """From the end of its backward's computation to the end of communication."""

    peer_s: float
    """Part of ``exposed_s`` until the slowest rank's backward was computed, too."""

    late_s: float
    """Its backward's end relative to the middle rank's (the lower of two middle
    ones).
    """

    part: str
    """The part of `PARTS` that adds most to ``late_s``."""

    part_s: float
    """Time of that part beyond the middle rank's."""

    clock_error_s: float
    """Largest clock error of its times relative to those of the lowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFigures:
    """One lane over all ranks; medians over the recorded steps, in seconds."""

    track: str

    send_s: float
    """Time in which a rank's lane sends while all ranks take part."""

    tail_s: float
    """Its last end on any rank after the slowest rank's backward was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFound:
    """Findings from a timeline of all ranks."""

    steps: tuple[int, ...]

    step_s: float
    """Median, from the first forward's start to the last rank's end."""

    typical: int
    """The number of the step of median length."""

    ranks: tuple[RankFigures, ...]
    """The ranks, by number."""

    lanes: tuple[LaneFigures, ...]
    """The lanes, by number."""

    late: tuple[RankFigures, ...]
    """The late ranks, latest first."""

    slow_lane: LaneFigures | None
    """The lane that ends long after the others, if any."""

    def words(self) -> str:
        """Return the finding in a sentence or two."""
        latest = max(self.ranks, key=lambda r: (r.late_s, -r.rank))
        error_s = max(r.clock_error_s for r in self.ranks)
        lane = ""
        if self.slow_lane is not None:
            lane = (
                f" {self.slow_lane.track} ends {format_s(self.slow_lane.tail_s)} after "
                "the slowest backward, long after the other lanes."
            )
        known = f" Clocks agree within {format_s(error_s)}." if error_s else ""
        if not self.late:
            return (
                f"No rank is late: the last one, rank {latest.rank}, has its gradients "
                f"{format_s(latest.late_s)} after the middle rank.{lane}{known}"
            )
        first = self.late[0]
        others = ""
        if len(self.late) > 1:
            names = ", ".join(str(r.rank) for r in self.late[1:])
            others = f" Also late: rank{'s' * (len(self.late) > 2)} {names}."
        return (
            f"Rank {first.rank} is late: it has its gradients {format_s(first.late_s)} "
            f"({first.late_s / self.step_s:.0%} of a step) after the middle rank, and "
            f"loses {format_s(max(0.0, first.part_s))} of that in "
            f"{PARTS[first.part]}.{others}{lane}{known}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One rank in one step."""

    start_s: float
    forward_s: float
    loss_s: float
    backward_s: float
    ready_s: float
    outside_s: float | None
    exposed_s: float
    peer_s: float
    clock_error_s: float


def find_late(timeline: Timeline) -> RanksFound | None:
    """Return the figures of every rank; ``None`` if no step shows all ranks.

    A rank's lateness is the end of its backward's computation relative to that of the
    middle rank: then all its gradients are sent and the others can stop waiting. It is
    late when the median over the steps is above `LATE_RATIO` of a step and above twice
    the possible clock error.
    """
    seen: dict[int, dict[int, _Seen]] = defaultdict(dict)
    ends_s: dict[int, float] = {}
    by_step = _grouped(timeline.spans)
    ranks = timeline.ranks
    for step, own in by_step.items():
        rows = {rank: _seen(own.get(rank, ())) for rank in ranks}
        if all(row is not None for row in rows.values()):
            seen[step] = {rank: row for rank, row in rows.items() if row is not None}
            start_s = min(row.start_s for row in seen[step].values())
            last_s = max(s.end_s for spans in own.values() for s in spans)
            ends_s[step] = last_s - start_s
    if not seen or not ranks:
        return None
    step_s = statistics.median(ends_s.values())
    figures = tuple(_figures(rank, seen) for rank in ranks)
    error_s = max(row.clock_error_s for row in figures)
    min_s = max(LATE_RATIO * step_s, 2 * error_s)
    late = sorted(
        (row for row in figures if row.late_s > min_s),
        key=lambda row: (-row.late_s, row.rank),
    )
    lanes = _lanes(by_step, seen)
    tails_s = [lane.tail_s for lane in lanes]
    slow = max(lanes, key=lambda lane: lane.tail_s, default=None)
    if slow and slow.tail_s - statistics.median_low(tails_s) <= max(
        0.05 * step_s, 2 * error_s
    ):
        slow = None
    return RanksFound(
        steps=tuple(sorted(seen)),
        step_s=step_s,
        typical=sorted(seen, key=lambda n: (ends_s[n], n))[(len(seen) - 1) // 2],
        ranks=figures,
        lanes=lanes,
        late=tuple(late),
        slow_lane=slow,
    )


def _grouped(spans: Iterable[Span]) -> dict[int, dict[int, list[Span]]]:
    found: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        step = span.args.get("step", 0)
        if span.rank is not None and type(step) is int:
            found[step][span.rank].append(span)
    return found


def _seen(spans: Iterable[Span]) -> _Seen | None:
    """Return one rank's step; ``None`` if forward or backward is missing."""
    kinds: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.track == "compute":
            kinds[str(span.args.get("kind"))].append(span)
    if not kinds["forward"] or not kinds["backward"]:
        return None
    forward, backward = kinds["forward"][0], kinds["backward"][0]
    outside = kinds["outside"]
    peer_s = sum(s.duration_s for s in kinds["peer"])
    error_s = forward.args.get("clock_error_s", 0.0)
    return _Seen(
        start_s=forward.start_s,
        forward_s=forward.duration_s,
        loss_s=backward.start_s - forward.end_s,
        backward_s=backward.duration_s,
        ready_s=backward.end_s,
        outside_s=outside[0].duration_s if outside else None,
        exposed_s=peer_s + sum(s.duration_s for s in kinds["exposed"]),
        peer_s=peer_s,
        clock_error_s=error_s if isinstance(error_s, (int, float)) else 0.0,
    )


def _figures(rank: int, seen: Mapping[int, Mapping[int, _Seen]]) -> RankFigures:
    own = [rows[rank] for rows in seen.values()]
    parts: dict[str, list[float]] = defaultdict(list)
    late_s = []
    for rows in seen.values():
        row = rows[rank]
        late_s.append(row.ready_s - _middle(r.ready_s for r in rows.values()))
        for name in ("forward", "loss", "backward"):
            mine = getattr(row, f"{name}_s")
            theirs = _middle(getattr(r, f"{name}_s") for r in rows.values())
            parts[name].append(mine - theirs)
        start_late_s = row.start_s - _middle(r.start_s for r in rows.values())
        between = [r.outside_s for r in rows.values() if r.outside_s is not None]
        if row.outside_s is None or len(between) < len(rows):
            continue  # the first recorded step: the time before it is unknown
        outside_late_s = row.outside_s - _middle(between)
        parts["outside"].append(outside_late_s)
        parts["communication"].append(start_late_s - outside_late_s)
    medians = {name: statistics.median(values) for name, values in parts.items()}
    part = max(medians, key=medians.__getitem__)
    outside = [row.outside_s for row in own if row.outside_s is not None]
    return RankFigures(
        rank=rank,
        forward_s=statistics.median(row.forward_s for row in own),
        backward_s=statistics.median(row.backward_s for row in own),
        outside_s=statistics.median(outside) if outside else None,
        exposed_s=statistics.median(row.exposed_s for row in own),
        peer_s=statistics.median(row.peer_s for row in own),
        late_s=statistics.median(late_s),
        part=part,
        part_s=medians[part],
        clock_error_s=max(row.clock_error_s for row in own),
    )


def _lanes(
    by_step: Mapping[int, Mapping[int, list[Span]]],
    seen: Mapping[int, Mapping[int, _Seen]],
) -> tuple[LaneFigures, ...]:
    sends: dict[str, list[float]] = defaultdict(list)
    tails: dict[str, list[float]] = defaultdict(list)
    for step, rows in seen.items():
        ready_s = max(row.ready_s for row in rows.values())
        ends_s: dict[str, float] = {}
        for spans in by_step[step].values():
            busy_s: dict[str, float] = defaultdict(float)
            for span in spans:
                if span.track.startswith("lane") and span.args.get("kind") == "send":
                    busy_s[span.track] += span.duration_s
                    last_s = ends_s.get(span.track, span.end_s)
                    ends_s[span.track] = max(last_s, span.end_s)
            for track, value_s in busy_s.items():
                sends[track].append(value_s)
        for track, end_s in ends_s.items():
            tails[track].append(max(0.0, end_s - ready_s))
    return tuple(
        LaneFigures(
            track=track,
            send_s=statistics.median(sends[track]),
            tail_s=statistics.median(tails[track]),
        )
        for track in sorted(sends, key=lambda name: (len(name), name))
    )


def _middle(values: Iterable[float]) -> float:
    return statistics.median_low(values)
