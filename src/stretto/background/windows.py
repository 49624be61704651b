"""A rank's windows: when in a step its device is idle, and for how long.

A prediction gives them in advance (`windows_of`), or they are learned from the marks of
steps that ran (`WindowLearner`). Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.schema.timeline import Span, Timeline

KNOWN_AFTER = 3
"""Steps after which a learned window is used."""

_WEIGHT = 0.3
"""The last step's weight in a learned window's begin."""

_LENGTHS = 8
"""Last lengths of a wait that are kept."""

_GRADIENTS = ("gradients to ", "norms of ")
"""How `stretto.sim.burst` names what it sums over ranks; the rest are samples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One interval of a step in which the device is idle."""

    begin_s: float
    """From the start of the step."""

    length_s: float

    kind: str
    """The cause of the foreground's wait, for instance ``redistribution``."""


def windows_of(
    timeline: Timeline, rank: int, *, min_s: float = 0.0
) -> tuple[Window, ...]:
    """Return a rank's windows in a predicted burst step.

    These are the gaps between what the rank computes, to the end of the step. The kind
    is ``synchronization`` where the communication that ends last in a gap sums
    gradients, else ``redistribution``; these name the executor's waits.

    Args:
        timeline: that of `stretto.sim.burst.BurstStep`.
        rank: whose windows.
        min_s: leave out shorter windows.

    Raises:
        SpecError: the timeline has no track of this rank.
    """
    return windows_by_rank(timeline, (rank,), min_s=min_s)[0]


def windows_by_rank(
    timeline: Timeline, ranks: Iterable[int], *, min_s: float = 0.0
) -> tuple[tuple[Window, ...], ...]:
    """Return `windows_of` for each of several ranks, in one pass over the timeline.

    Raises:
        SpecError: the timeline has no track of a rank.
    """
    tracks: dict[str, list[Span]] = {}
    for span in timeline.spans:
        tracks.setdefault(span.track, []).append(span)
    end_s = timeline.end_s
    found = []
    for rank in ranks:
        computing, sending = f"rank{rank}", f"rank{rank} network"
        if computing not in tracks and sending not in tracks:
            raise SpecError(
                f"the timeline {timeline.name!r} has no track of rank {rank}; it has "
                f"{', '.join(timeline.tracks) or 'no tracks'}"
            )
        busy = sorted((s.start_s, s.end_s) for s in tracks.get(computing, ()))
        found.append(_gaps(busy, tracks.get(sending, []), end_s, min_s))
    return tuple(found)


def _gaps(
    busy: Sequence[tuple[float, float]],
    sent: Sequence[Span],
    last_s: float,
    min_s: float,
) -> tuple[Window, ...]:
    """Return the times until ``last_s`` in which nothing is computed."""
    found, at_s = [], 0.0
    for start_s, end_s in [*busy, (last_s, last_s)]:
        if start_s - at_s > max(min_s, 1e-12):
            found.append(
                Window(
                    begin_s=at_s,
                    length_s=start_s - at_s,
                    kind=_kind_of(sent, at_s, start_s),
                )
            )
        at_s = max(at_s, end_s)
    return tuple(found)


def _kind_of(sent: Sequence[Span], begin_s: float, end_s: float) -> str:
    within = [span for span in sent if span.end_s > begin_s and span.start_s < end_s]
    if not within:
        return "redistribution"
    last = max(within, key=lambda span: min(span.end_s, end_s))
    return "synchronization" if last.name.startswith(_GRADIENTS) else "redistribution"


def usable_s(windows: Sequence[Window], task_s: float) -> float:
    """Return the time that whole tasks of one length use of windows.

    This is the sum of floor(w / b) * b over windows w, with b the length of a task.

    Raises:
        SpecError: the length is not positive.
    """
    if not task_s > 0.0:
        raise SpecError(f"task_s must be positive, got {task_s:g}")
    return sum((w.length_s + 1e-12) // task_s * task_s for w in windows)


class Expected(NamedTuple):
    """Estimates of a wait that has begun."""

    usual_s: float
    """Its median length."""

    short_s: float
    """The length that three of four such waits exceed: tasks that fit it rarely outlast
    the wait."""

    longer: int
    """How many waits of the step are usually at least as long, itself included."""


_UNKNOWN = Expected(0.0, 0.0, 0)


@final
@dataclass(slots=True)
class _Position:
    """The wait at one position of the step."""

    kind: str
    begin_s: float
    lengths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LENGTHS))
    seen: int = 0
    expected: Expected = _UNKNOWN

    def add(self, begin_s: float, length_s: float) -> None:
        self.seen += 1
        # Plain means first: a weight of 0.3 would keep half of a slow first step.
        weight = max(_WEIGHT, 1.0 / self.seen)
        self.begin_s += weight * (begin_s - self.begin_s)
        self.lengths_s.append(length_s)
        usual_s = statistics.median(self.lengths_s)
        short_s = sorted(self.lengths_s)[len(self.lengths_s) // 4]
        self.expected = Expected(usual_s, short_s, 0)


@final
class WindowLearner:
    """Learns a step's windows from its waits, by their position in the step.

    Steps with other kinds of waits from a position on start that part again.
    """

    def __init__(self) -> None:
        self._positions: list[_Position] = []

    def add(self, waits: Sequence[Window]) -> None:
        """Add the waits of one complete step, in their order."""
        known = self._positions
        for i, wait in enumerate(waits):
            if i >= len(known) or known[i].kind != wait.kind:
                del known[i:]
                known.append(_Position(wait.kind, wait.begin_s))
            known[i].add(wait.begin_s, wait.length_s)
        del known[len(waits) :]
        by_length = sorted(known, key=lambda p: -p.expected.usual_s)
        for count, position in enumerate(by_length, start=1):
            position.expected = position.expected._replace(longer=count)

    def expected(self, position: int, kind: str) -> Expected | None:
        """Return what is known of the wait at a position; ``None`` if nothing is."""
        if position >= len(self._positions):
            return None
        found = self._positions[position]
        if found.kind != kind or found.seen < KNOWN_AFTER:
            return None
        return found.expected

    def next_begin_s(self, position: int, min_s: float) -> float | None:
        """Return when in the step the next wait of some length usually begins.

        Args:
            position: of the first wait that counts.
            min_s: usual length of those that count.

        Returns:
            ``None`` if there is no such wait.
        """
        for found in self._positions[position:]:
            if found.seen >= KNOWN_AFTER and found.expected.usual_s >= min_s:
                return found.begin_s
        return None

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows known so far."""
        return tuple(
            Window(begin_s=p.begin_s, length_s=p.expected.usual_s, kind=p.kind)
            for p in self._positions
            if p.seen >= KNOWN_AFTER
        )

    @property
    def longest_s(self) -> float:
        """The longest `Expected.short_s` known so far; 0 if none is."""
        known = (p.expected.short_s for p in self._positions if p.seen >= KNOWN_AFTER)
        return max(known, default=0.0)
