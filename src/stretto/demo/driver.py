"""The command's side of the demo: start the lab, then show the ranks' results."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from stretto.demo.settings import DemoOutcome, DemoSettings
from stretto.errors import LabError, MissingPackage, SpecError
from stretto.lab import LabSpec, Mode, run_lab
from stretto.measure.others import OthersLoad, busy_note
from stretto.measure.steady import DEFAULT_MAX_SPREAD_RATIO
from stretto.report import (
    MethodResult,
    RunReport,
    save_results,
    save_trace,
)
from stretto.report import (
    save as save_page,
)
from stretto.schema import Cluster, Plan, Timeline, Workload
from stretto.tune.result import BOUND_HOLDS_RATIO
from stretto.units import counted, format_rate, format_s

SETTINGS_FILE = "settings.json"
OUTCOME_FILE = "outcome.json"


def run_demo(
    settings: DemoSettings,
    spec: LabSpec,
    *,
    mode: Mode = Mode.AUTO,
    timeout_s: float = 900.0,
) -> RunReport:
    """Run one demo; return its report, and write its files into ``settings.out``.

    Raises:
        LabError: the lab is unavailable, or the training in it failed.
        MissingPackage: the convnet's data needs scikit-learn.
        SpecError: the folder cannot be written.
    """
    require_data(settings)
    out = Path(settings.out)
    for folder in (out, out / "plans"):
        make_folder(folder)
    load = OthersLoad()
    with tempfile.TemporaryDirectory(prefix="stretto-demo-") as scratch:
        run_ranks("stretto.demo.worker", settings, spec, scratch, mode, timeout_s)
        note = busy_note(load.cores())
        if note is not None:
            sys.stderr.write(f"stretto: {note}\n")
        report = _report(settings, spec, Path(scratch), note)
    save_results(out / "results.json", report)
    save_trace(out / "trace.json", report)
    save_page(out / "report.html", report)
    return report


def run_ranks(
    program: str,
    settings: DemoSettings,
    spec: LabSpec,
    scratch: str,
    mode: Mode,
    timeout_s: float,
) -> None:
    """Run a module as every rank of the lab, with the settings in a scratch folder.

    Raises:
        LabError: the lab is unavailable, or the training in it failed.
    """
    settings.save(Path(scratch) / SETTINGS_FILE)
    status = run_lab(
        spec,
        [sys.executable, "-m", program, scratch],
        mode=mode,
        timeout_s=timeout_s,
    )
    if status:
        raise LabError(
            f"the training in the lab ended with status {status}; see its own message "
            "above"
        )


def require_data(settings: DemoSettings) -> None:
    """Require the package that has the model's data.

    Raises:
        MissingPackage: the convnet's data needs scikit-learn.
    """
    if settings.model == "convnet" and importlib.util.find_spec("sklearn") is None:
        raise MissingPackage(
            "the convnet trains on scikit-learn's digits: "
            'pip install "stretto[demo]", or choose --model transformer'
        )


def make_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        SpecError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SpecError(f"{folder}: cannot be created: {exc.strerror}") from exc


def plan_file(out: Path, method: str) -> Path:
    """Return the path of a method's plan."""
    return out / "plans" / f"{method}.json"


def _report(
    settings: DemoSettings, spec: LabSpec, scratch: Path, busy: str | None
) -> RunReport:
    out = Path(settings.out)
    outcome = DemoOutcome.load(scratch / OUTCOME_FILE)
    cluster = Cluster.load(out / "cluster.json")
    workload = Workload.load(out / "workload.json")
    medians = {m.name: statistics.median(m.steps_s) for m in outcome.methods}
    methods = []
    for found in outcome.methods:
        first, _, third = statistics.quantiles(found.steps_s, n=4)
        methods.append(
            MethodResult(
                name=found.name,
                description=found.description,
                predicted_step_s=found.predicted_step_s,
                measured_step_s=medians[found.name],
                spread_s=(third - first) / 2,
                speedup_over_ddp=medians["ddp"] / medians[found.name],
                bound_share=outcome.bound_s / medians[found.name],
                final_loss=found.losses[-1],
                steps=tuple(found.steps_s),
                losses=tuple(found.losses),
                predicted=Timeline.load(scratch / f"predicted-{found.name}.json"),
                measured=Timeline.load(scratch / f"measured-{found.name}.json"),
                plan=Plan.load(plan_file(out, found.name)),
            )
        )
    return RunReport(
        title=f"{settings.model} on {counted(spec.hosts, 'host')}, {_network(spec)}",
        cluster=cluster,
        workload=workload,
        methods=tuple(methods),
        bound_s=outcome.bound_s,
        bound_scope=outcome.bound_scope,
        environment=_environment(settings, spec, outcome),
        notes=(
            *_notes(outcome),
            *spread_notes(workload.provenance["backward_spread_ratio"]),
            *([] if busy is None else [busy]),
        ),
    )


def _network(spec: LabSpec) -> str:
    text = f"{format_rate(spec.link_bytes_per_s)} links"
    if spec.flow_bytes_per_s is not None:
        text += f", {format_rate(spec.flow_bytes_per_s)} per flow"
    return text


def _environment(
    settings: DemoSettings, spec: LabSpec, outcome: DemoOutcome
) -> dict[str, Any]:
    return {
        **outcome.environment,
        "model": settings.model,
        "parameters": outcome.parameters,
        "hosts": spec.hosts,
        "ranks_per_host": spec.ranks_per_host,
        "link": format_rate(spec.link_bytes_per_s),
        "flow": "none"
        if spec.flow_bytes_per_s is None
        else format_rate(spec.flow_bytes_per_s),
        "batch_per_rank": settings.batch_per_rank,
        "steps": settings.steps,
        "seed": settings.seed,
    }


def _notes(outcome: DemoOutcome) -> tuple[str, ...]:
    sizes = ", ".join(
        f"{label} {format_s(step_s)}"
        for label, step_s in outcome.bucket_sizes_s.items()
    )
    losses = [m.losses[-1] for m in outcome.methods]
    apart = (max(losses) - min(losses)) / max(abs(loss) for loss in losses)
    return (
        (
            f"DDP by bucket size, median of a few steps each: {sizes}; the best is "
            "ddp-best."
        ),
        (
            "Gradients of stretto against DDP's after one backward on the same batch: "
            f"largest relative difference {outcome.gradient_difference:.1e}."
        ),
        (
            f"Final losses differ by {apart:.1e} relative: same seeds, same data; on "
            "more than two ranks the order of the sums rounds them differently."
        ),
        *bound_notes(
            outcome.bound_s, min(statistics.median(m.steps_s) for m in outcome.methods)
        ),
    )


def spread_notes(spread_ratio: float) -> tuple[str, ...]:
    """Return a note if the profile's steps were too unsteady to predict with."""
    if spread_ratio <= DEFAULT_MAX_SPREAD_RATIO:
        return ()
    return (
        (
            "While the profile was measured, the time of backward was unsteady: its "
            f"quartiles were {100 * spread_ratio:.0f} % of the median apart. "
            "Predictions may be wrong by as much. Run the demo again on a quiet "
            "machine."
        ),
    )


def bound_notes(bound_s: float, fastest_s: float) -> tuple[str, ...]:
    """Return a note if the measured steps contradict the lower bound."""
    if bound_s <= BOUND_HOLDS_RATIO * fastest_s:
        return ()
    return (
        (
            f"The fastest method's step, {format_s(fastest_s)}, is below the lower "
            f"bound of {format_s(bound_s)}: during the profile the machine was at "
            f"least {bound_s / fastest_s:.1f} times as busy, so its bound and "
            "predictions are invalid. Run the demo again on a quiet machine."
        ),
    )
