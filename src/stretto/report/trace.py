"""Predicted and measured timelines side by side in one Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.schema import codec

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.report.results import DemoReport
    from stretto.schema import Timeline

PREDICTED = "predicted"
MEASURED = "measured"


def labelled_timelines(report: DemoReport) -> dict[str, Timeline]:
    """Every timeline of a report under ``METHOD predicted`` or ``METHOD measured``."""
    found = {}
    for method in report.methods:
        for label, timeline in (
            (PREDICTED, method.predicted),
            (MEASURED, method.measured),
        ):
            if timeline is not None:
                found[f"{method.name} {label}"] = timeline
    return found


def save_trace(path: str | Path, report: DemoReport) -> None:
    """Writes the timelines of a report as one trace that Perfetto opens.

    Each is a process; computation and lanes are its threads.

    Raises:
        SpecError: the file can't be written.
    """
    codec.save_timelines(path, labelled_timelines(report))


def split_label(label: str) -> tuple[str, bool]:
    """The method of a label in a trace, and whether its timeline was measured.

    What carries neither word is taken as measured under its whole label.
    """
    name, _, word = label.rpartition(" ")
    if name and word in (PREDICTED, MEASURED):
        return name, word == MEASURED
    return label, True
