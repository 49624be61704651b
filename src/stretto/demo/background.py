"""The demo of background jobs: start the lab, then show what each arrangement gives."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto.demo.driver import make_folder, require_data, run_ranks
from stretto.demo.settings import Exchanged
from stretto.lab import LabSpec, Mode
from stretto.measure.others import OthersLoad, busy_note
from stretto.report.background import Arrangement, save_background
from stretto.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.demo.settings import DemoSettings

OUTCOME_FILE = "background.json"

ALONE, BACKGROUND, PARTITION, TOGETHER = (
    "foreground alone",
    "background alone",
    "static partition",
    "together",
)


_MAX_BESIDE = 1.1
"""The background jobs' rate beside the foreground over that alone, at most: a processor
that is kept busy may compute a little faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Samples a second of both jobs in one arrangement."""

    foreground: float
    background: float
    """Rate of all hosts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOutcome(Exchanged):
    """Results of the ranks: written by rank 0, read by the command."""

    cycles: list[dict[str, Measured]]
    """By arrangement."""

    isolation: str
    final_loss: float


def run_background_demo(
    settings: DemoSettings,
    spec: LabSpec,
    *,
    mode: Mode = Mode.AUTO,
    timeout_s: float = 900.0,
) -> tuple[list[Arrangement], tuple[str, ...]]:
    """Run the demo; return arrangements and notes, and write its files.

    Raises:
        LabError: the lab is unavailable, or the training in it failed.
        MissingPackage: the convnet's data needs scikit-learn.
        SpecError: the folder cannot be written.
    """
    require_data(settings)
    out = Path(settings.out)
    make_folder(out)
    load = OthersLoad()
    with tempfile.TemporaryDirectory(prefix="stretto-demo-") as scratch:
        run_ranks(
            "stretto.demo.background_worker", settings, spec, scratch, mode, timeout_s
        )
        outcome = BackgroundOutcome.load(Path(scratch) / OUTCOME_FILE)
    rows = arrangements(outcome, spec.hosts)
    busy = busy_note(load.cores())
    notes = (*_notes(outcome, spec), *([] if busy is None else [busy]))
    title = f"{settings.model} on {counted(spec.hosts, 'host')} with background jobs"
    save_background(out / "background.html", title=title, rows=rows, notes=notes)
    found = {
        "title": title,
        "arrangements": [msgspec.to_builtins(row) for row in rows],
        "notes": notes,
        "isolation": outcome.isolation,
        "final_loss": outcome.final_loss,
    }
    (out / "background.json").write_text(json.dumps(found, indent=1) + "\n")
    return rows, notes


def arrangements(outcome: BackgroundOutcome, hosts: int) -> list[Arrangement]:
    """Return each arrangement's rates over those of the jobs alone, as medians.

    A cycle in which the background jobs' rate alone is not known counts for the
    foreground only, see `_is_measured`.
    """
    words = {
        ALONE: f"on {counted(hosts, 'host')}",
        BACKGROUND: f"one job on each of {hosts} hosts",
        PARTITION: f"foreground on {counted(hosts - 1, 'host')}, background on 1",
        TOGETHER: f"both on {counted(hosts, 'host')}, the background in idle time",
    }
    cycles = outcome.cycles
    measured = [cycle for cycle in cycles if _is_measured(cycle)]
    found = []
    for name, description in words.items():
        pairs = [
            (
                cycle[name].foreground / cycle[ALONE].foreground,
                cycle[name].background / cycle[BACKGROUND].background,
            )
            for cycle in measured
        ]
        totals = [one + two for one, two in pairs]
        found.append(
            Arrangement(
                name=name,
                description=description,
                foreground=statistics.median(
                    cycle[name].foreground / cycle[ALONE].foreground for cycle in cycles
                ),
                background=_median([two for _, two in pairs]),
                total=_median(totals),
                min_total=min(totals, default=None),
                max_total=max(totals, default=None),
            )
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _is_measured(cycle: dict[str, Measured]) -> bool:
    """Return whether a cycle says what the background jobs do alone.

    Other work comes before them. On a busy machine they may get no processor time even
    alone, or less than beside the foreground, whose ranks sometimes wait.
    """
    alone = cycle[BACKGROUND].background
    most = max(cycle[name].background for name in (PARTITION, TOGETHER))
    return alone > 0.0 and most <= _MAX_BESIDE * alone


def _unmeasured_note(outcome: BackgroundOutcome) -> str | None:
    """Return which cycles say nothing of the background jobs; ``None`` without any."""
    number = len(outcome.cycles)
    count = sum(not _is_measured(cycle) for cycle in outcome.cycles)
    if not count:
        return None
    which = f"{count} of the {number}" if count < number else f"all {number}"
    return (
        f"In {which} cycles other work kept the processors from the background jobs: "
        "alone they got nothing, or less than beside the foreground. So those cycles "
        "say nothing of their rates. Run the demo on a machine without other work."
    )


def _notes(outcome: BackgroundOutcome, spec: LabSpec) -> tuple[str, ...]:
    cores = len(os.sched_getaffinity(0))
    how = (
        "Rates are samples a second over those of the same job alone; the total is "
        "their sum. Each arrangement is measured once per cycle; medians of "
        f"{counted(len(outcome.cycles), 'cycle')}, with the smallest and largest total."
    )
    notes = [how, f"Priority: {outcome.isolation}."]
    if cores < spec.hosts:
        notes.append(
            f"{spec.hosts} hosts share {cores} processors here, so idle time of one "
            "host is partly used by the others, and backgrounds get less than on "
            "hosts with processors of their own."
        )
    unmeasured = _unmeasured_note(outcome)
    return (*notes, *([] if unmeasured is None else [unmeasured]))
