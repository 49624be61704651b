"""Named spans on named tracks, one type for predicted and measured times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError
from stretto.schema import _rules, codec

if TYPE_CHECKING:
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
        _rules.not_empty(".track", self.track)
        _rules.finite(".start_s", self.start_s)
        _rules.finite(".end_s", self.end_s)
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
    """What happened, or will happen, in one step.

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
        return codec.load_timeline(path)

    def save(self, path: str | Path) -> None:
        """Write the timeline atomically, as Chrome trace events."""
        codec.save_timeline(path, self)


def _track_order(track: str) -> tuple[int, int, str]:
    if track == "compute":
        return (0, 0, "")
    if track.startswith("lane") and track[4:].isdigit():
        return (1, int(track[4:]), "")
    return (2, 0, track)
