"""``stretto cluster simulate``: replay a trace under several policies."""

from __future__ import annotations

import click

from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._values import Real, Whole
from stretto.cluster.policies import registry


@click.command(cls=OutputCommand, name="simulate")
@click.argument("trace_file", metavar="TRACE", type=click.Path())
@click.option(
    "--policy",
    "policies",
    default="fifo,partition,deeppool",
    show_default=True,
    help=f"Policies, separated by commas: {', '.join(registry.NAMES)}, or those of "
    "installed packages.",
)
@click.option("--gpus", type=Whole(1, 100_000), required=True, help="GPUs to simulate.")
@click.option(
    "--seed",
    type=Whole(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Random seed: draws each job's model, and roles that the trace lacks.",
)
@click.option(
    "--jobs",
    type=Whole(min=1),
    help="Number of jobs to use, the first ones.",
)
@click.option(
    "--backgrounds",
    type=Real(0.0, 1.0),
    default=0.3,
    show_default=True,
    help="Share of jobs that are backgrounds, if the trace does not say.",
)
@click.option(
    "--flexible",
    is_flag=True,
    help="Let foregrounds use fewer GPUs than they asked for.",
)
@click.option(
    "--start",
    "start_s",
    type=Real(min=0.0),
    default=0.0,
    show_default=True,
    help="Seconds from a start until a job makes progress.",
)
@click.option(
    "--collocation",
    metavar="FILE",
    help="Measured pairs of jobs, from `stretto run --collocation`; the first counts.",
)
@click.option(
    "--report",
    "page",
    callback=writable,
    metavar="HTML",
    help="Write a page with the policies side by side.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate_command(
    trace_file: str,
    policies: str,
    gpus: int,
    seed: int,
    jobs: int | None,
    backgrounds: float,
    flexible: bool,
    start_s: float,
    collocation: str | None,
    page: str | None,
    as_json: bool,
) -> None:
    """Replay TRACE, the jobs of a cluster, under several policies.

    TRACE is Philly's JSON, or a CSV file of Helios, PAI 2020 (its task table) or
    Alibaba spot-gpu 2026. Traces name no models, so each job is a model of the zoo.
    """
    from stretto.cluster.replay import ReplayOptions, replay
    from stretto.cluster.traces import load_trace
    from stretto.report.cluster import policies_table, save_policies
    from stretto.schema import Collocation

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--policy needs at least one name")
    for name in names:
        registry.get(name)
    pair = None if collocation is None else Collocation.load(collocation).rows[0]
    trace = load_trace(trace_file, max_jobs=jobs)
    options = ReplayOptions(
        gpus=gpus,
        seed=seed,
        background_ratio=backgrounds,
        flexible=flexible,
        start_s=start_s,
        pair=pair,
    )
    with _planning.progress(f"simulating {len(trace.jobs)} jobs"):
        found = replay(trace, names, options)
    if page is not None:
        save_policies(page, found)
    if as_json:
        click.echo(_planning.json_text(found))
        return
    click.echo(policies_table(found))
    for text in found["assumed"]:
        click.echo(text)
    if page is not None:
        click.echo(f"page written to {page}")
