"""``stretto demo``: run the main job end to end on one machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stretto.cli._lab_options import hosts_option, ranks_per_host_option
from stretto.cli._values import Rate, Real, Whole
from stretto.lab.spec import MIN_RATE_BYTES_PER_S

if TYPE_CHECKING:
    from stretto.demo.settings import DemoSettings
    from stretto.lab import LabSpec, Mode


@click.command()
@click.argument(
    "job", type=click.Choice(["main", "background"]), default="main", required=False
)
@click.option(
    "--model",
    type=click.Choice(["convnet", "transformer"]),
    default="convnet",
    show_default=True,
    help="Convolutions on handwritten digits, or attention on English text.",
)
@hosts_option
@ranks_per_host_option
@click.option(
    "--link",
    type=Rate(least=MIN_RATE_BYTES_PER_S),
    default="1gbit",
    show_default=True,
    help="Rate of each link.",
)
@click.option(
    "--flow",
    type=Rate(least=MIN_RATE_BYTES_PER_S, optional=True),
    default="300mbit",
    show_default=True,
    help="Largest rate of one TCP flow, or none for no limit.",
)
@click.option(
    "--steps", type=Whole(min=6), help="Training steps per method.  [default: 24]"
)
@click.option("--batch", type=Whole(min=1), help="Samples per rank and step.")
@click.option("--width", type=Whole(min=1), help="Width of the model.")
@click.option(
    "--seed",
    type=Whole(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Random seed.",
)
@click.option("--quick", is_flag=True, help="Fewer steps: under 90 seconds.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "namespaces", "paced"]),
    default="auto",
    show_default=True,
    help="How the network is emulated.",
)
@click.option(
    "--out",
    default="demo-out",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Folder for the demo's output.",
)
@click.option(
    "--timeout",
    type=Real(min=0, min_open=True),
    default=900.0,
    show_default=True,
    help="Time limit in seconds.",
)
@click.option(
    "--json", "as_json", is_flag=True, help=("Print results.json instead of a table.")
)
def command(
    job: str,
    model: str,
    hosts: int,
    ranks_per_host: int,
    link: float,
    flow: float | None,
    steps: int | None,
    batch: int | None,
    width: int | None,
    seed: int,
    quick: bool,
    mode: str,
    out: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Measure, plan, predict and train by several methods, on one machine.

    Real training of a real model over an emulated cloud cluster: five methods, each
    predicted and measured. Writes report.html, trace.json, results.json, the workload,
    the cluster and the plans into OUT. Takes under 5 minutes on 2 cores.

    `stretto demo background` trains one foreground on all hosts and a background job in
    each host's idle time, and compares with each job alone and with a static partition
    of the hosts. Writes background.html and background.json.
    """
    from stretto.demo.settings import HEADS, DemoSettings

    if model == "transformer" and width is not None and width % HEADS:
        raise click.BadParameter(
            f"{width} is not a multiple of {HEADS}, the transformer's heads.",
            param_hint="'--width'",
        )
    from stretto.demo.driver import run_demo
    from stretto.lab import LabSpec, Mode
    from stretto.report import results_json
    from stretto.report.tables import methods_table

    begin = time.perf_counter()
    spec = LabSpec(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        link_bytes_per_s=link,
        flow_bytes_per_s=flow,
    )
    settings = DemoSettings(
        out=str(Path(out).absolute()),
        model=model,
        batch_per_rank=batch or (32 if model == "convnet" else 4),
        width=width,
        steps=steps or (6 if quick else 24),
        screening_steps=2 if quick else 4,
        screening_warmup=1 if quick else 2,
        profile_steps=10 if quick else 16,
        probe_budget_s=6.0 if quick else 25.0,
        seed=seed,
    )
    if job == "background":
        _background(settings, spec, Mode(mode), timeout, as_json=as_json)
        return
    report = run_demo(settings, spec, mode=Mode(mode), timeout_s=timeout)
    if as_json:
        click.echo(json.dumps(results_json(report)))
        return
    click.echo(methods_table(report))
    for note in report.notes:
        click.echo(f"* {note}")
    minutes, seconds = divmod(round(time.perf_counter() - begin), 60)
    click.echo(
        f"\nOpen {Path(out) / 'report.html'} for all results, and "
        f"{Path(out) / 'trace.json'} in ui.perfetto.dev. Took {minutes} min {seconds} "
        "s."
    )


def _background(
    settings: DemoSettings,
    spec: LabSpec,
    mode: Mode,
    timeout_s: float,
    *,
    as_json: bool,
) -> None:
    from stretto.demo.background import run_background_demo
    from stretto.report.background import arrangements_table

    rows, notes = run_background_demo(settings, spec, mode=mode, timeout_s=timeout_s)
    out = Path(settings.out)
    if as_json:
        click.echo((out / "background.json").read_text(), nl=False)
        return
    click.echo(arrangements_table(rows))
    for note in notes:
        click.echo(f"* {note}")
    click.echo(f"\nOpen {out / 'background.html'} for a picture.")
