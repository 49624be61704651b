"""Write the page of tuning's figures, from the stored results of tune_network.py."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

from _record import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = RESULTS / "tuning.md"

HEAD = """# Figures of tuning inside the run

Emulated networks of four ranks on two shared cores, torch 2.13 on CPU, Gloo over TCP.
For every case the whole grid of plans is measured offline, then a run of 100 steps with
default options, the same again with the first one's memory, two runs of 100 steps that
use its plan from the first step on, another with default options and no memory, and one
by AIACC's ensemble without a model; at the end all settled plans and DDP with default
options are measured in turns. Written by `make bench-tune`
(`benchmarks/tune_network.py`); events and steps in `tune_*.json`. Bold: target missed.

"""

NOTE = """
*Lost in trials*: time of trials beyond the settled plan's steps, over 100 of these,
including steps of changes and pauses for corrections of the model.
*Lost in total* is the whole time of both tuned runs over that of both that knew the
plan, including profiled steps, probe, planning and changes of plan. Ratios to the best
of the grid are medians over turns in which the plans followed each other, and their
quartiles, of the first tuned run and of the other one. Steps count from the first of
the run; the first six to eight are profiled.

"""


def write_page() -> str:
    """Write the page from all existing results; return its text."""
    found = {
        path.stem.removeprefix("tune_"): json.loads(path.read_text())
        for path in sorted(RESULTS.glob("tune_*.json"))
    }
    ablations = {name: found.pop(name) for name in list(found) if "_ablations" in name}
    halved = found.pop("halved", None)
    text = HEAD
    if found:
        text += _cases(found)
    if halved is not None:
        text += _halved(halved)
    for name, one in ablations.items():
        text += _ablations(name.removesuffix("_ablations"), one)
    PAGE.write_text(text)
    return text


def _cases(found: dict[str, dict]) -> str:
    rows = []
    for name, one in found.items():
        guided, blind = one["runs"]["guided"], one["runs"]["blind"]
        rows.append(
            [
                name.replace("_", " "),
                *(_over_grid(one["runs"][run]) for run in ("guided", "again")),
                _held(f"{guided['over_ddp']:.2f}", guided["over_ddp"] >= 0.98),
                _steps(guided["steps_within_5_percent"]),
                _held(f"{guided['trials_lost_share']:.1%}", _low(guided)),
                _held(f"{one['lost_in_all']:.1%}", one["lost_in_all"] <= 0.05),
                _held(
                    f"{one['second_first_step_over_settled']:.3f}",
                    one["second_first_step_over_settled"] <= 1.03,
                ),
                f"{blind['over_grid']:.3f}",
                _steps(blind["steps_within_5_percent"]),
                f"{blind['trials_lost_share']:.0%}",
            ]
        )
    reach = ["target", "1.02", "1.02", "1", "15", "5 %", "5 %", "1.03", "", "60", ""]
    middle = ["median", *[""] * 10]
    for column, run in ((4, "guided"), (9, "blind")):
        steps = [one["runs"][run]["steps_within_5_percent"] for one in found.values()]
        middle[column] = (
            f"{statistics.median(1e9 if s is None else s for s in steps):g}"
        )
    head = [
        "case",
        "settled / best of grid",
        "another run / best of grid",
        "DDP / settled",
        "steps to 5 %",
        "lost in trials",
        "lost in total",
        "second run / settled",
        "without a model / best of grid",
        "its steps to 5 %",
        "its loss in trials",
    ]
    return _table(head, [reach, *rows, middle]) + NOTE


def _low(run: dict) -> bool:
    return run["trials_lost_share"] <= 0.05


def _over_grid(run: dict) -> str:
    low, _, high = run["over_grid_quartiles"]
    return _held(
        f"{run['over_grid']:.3f} ({low:.2f} to {high:.2f})", run["over_grid"] <= 1.02
    )


def _halved(one: dict) -> str:
    after = {name: times["median_s"] for name, times in one["times"].items()}
    rows = [
        ["steps to notice", "", str(one["noticed_after"])],
        [
            "steps to the new plan",
            "50",
            _held(str(one["planned_after"]), (one["planned_after"] or 1e9) <= 50),
        ],
        [
            "share of what is then possible (best of the grid)",
            "90 %",
            _held(f"{one['of_possible']:.0%}", one["of_possible"] >= 0.9),
        ],
        [
            "step: DDP, plan from before, settled again, best of the grid",
            "",
            ", ".join(
                f"{1e3 * after[name]:.0f} ms"
                for name in (
                    "ddp",
                    "plan from before",
                    "settled again",
                    "best of the grid",
                )
            ),
        ],
    ]
    return "## A link halved during the run\n\n" + _table(
        ["what", "target", "measured"], rows
    )


def _ablations(name: str, one: dict) -> str:
    rows = [
        [
            run,
            f"{values['over_grid']:.3f}",
            _steps(values["steps_within_5_percent"]),
            str(values["trials"]),
            f"{values['trials_lost_share']:.1%}",
        ]
        for run, values in one["runs"].items()
    ]
    head = [
        "search",
        "settled / best of grid",
        "steps to 5 %",
        "trials",
        "lost in trials",
    ]
    return f"\n## Effect of each part: {name.replace('_', ' ')}\n\n" + _table(
        head, rows
    )


def _steps(steps: int | None) -> str:
    return "never" if steps is None else str(steps)


def _held(text: str, holds: bool) -> str:
    return text if holds else f"**{text}**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        "| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)
    ]
    return "\n".join(lines) + "\n"
