"""Predicted and measured timelines side by side in one Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.schema.timeline import save_timelines

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.report.results import RunReport
    from stretto.schema import Timeline

PREDICTED = "predicted"
MEASURED = "measured"
RANKS = "all ranks"


def labeled_timelines(report: RunReport) -> dict[str, Timeline]:
    """Yield every timeline of a report with its method's name and its kind.

    The kind is ``predicted``, ``measured`` or ``all ranks``.
    """
    found = {}
    for method in report.methods:
        for label, timeline in (
            (PREDICTED, method.predicted),
            (MEASURED, method.measured),
            (RANKS, method.ranks),
        ):
            if timeline is not None:
                found[f"{method.name} {label}"] = timeline
    return found


def save_trace(path: str | Path, report: RunReport) -> None:
    """Write the timelines of a report as one trace that Perfetto opens.

    Each timeline is a process, one per rank if it is of all ranks; computation and
    lanes are its threads.

    Raises:
        SpecError: the file cannot be written.
    """
    save_timelines(path, labeled_timelines(report))


def split_label(label: str) -> tuple[str, str]:
    """Return the method of a label in a trace, and its timeline's kind.

    A label without one of stretto's words counts as a measured timeline of that name.
    """
    for word in (PREDICTED, MEASURED, RANKS):
        name = label.removesuffix(f" {word}")
        if name and name != label:
            return name, word
    return label, MEASURED
