"""``stretto tune``: plans that earlier runs settled on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto.errors import SpecError
from stretto.units import format_s

if TYPE_CHECKING:
    from stretto.tune.memory import PlanMemory, Remembered

_WHERE = click.option(
    "--memory",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="the file; by default STRETTO_MEMORY, or plans.sqlite in the user's cache",
)


@click.group(name="tune")
def command() -> None:
    """Plans that earlier runs settled on, from which equal jobs start."""


@command.command(name="list")
@_WHERE
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def list_command(path: Path | None, as_json: bool) -> None:
    """Lists the settled plans, newest first."""
    rows = [_row(entry) for entry in _memory(path).all()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("nothing is remembered yet")
        return
    click.echo(
        f"{'number':>6}  {'model':<24}{'ranks':<12}{'step':>10}{'DDP':>10}  when"
    )
    for row in rows:
        ranks = f"{row['hosts']} x {row['ranks_per_host']}"
        ddp = "-" if row["ddp_step_s"] is None else format_s(row["ddp_step_s"])
        click.echo(
            f"{row['number']:>6}  {row['name']:<24}{ranks:<12}"
            f"{format_s(row['step_s']):>10}{ddp:>10}  {row['at']}"
        )


@command.command()
@click.argument("number", type=int)
@_WHERE
@click.option("-o", "--output", metavar="PLAN", help="write the plan to this file")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def show(number: int, path: Path | None, output: str | None, as_json: bool) -> None:
    """Shows the settled plan NUMBER of the list."""
    for entry in _memory(path).all():
        if entry.number == number:
            break
    else:
        raise SpecError(f"no plan {number} is remembered: `stretto tune list`")
    if output is not None:
        entry.plan.save(output)
    if as_json:
        click.echo(json.dumps(_row(entry), indent=2))
        return
    from stretto.report.tables import plan_table

    row = _row(entry)
    click.echo(f"{row['name']} on {row['hosts']} x {row['ranks_per_host']} ranks")
    click.echo(f"settled {row['at']} UTC in {row['surroundings']}")
    click.echo(f"measured step {format_s(entry.step_s)}")
    click.echo(plan_table(entry.plan, entry.workload))


@command.command()
@click.argument("number", type=int, required=False)
@click.option("--all", "everything", is_flag=True, help="forget all of them")
@_WHERE
def forget(number: int | None, everything: bool, path: Path | None) -> None:
    """Forgets the settled plan NUMBER, or all."""
    if (number is None) == (not everything):
        raise click.UsageError("give the NUMBER of a plan, or --all")
    dropped = _memory(path).forget(number)
    if number is not None and not dropped:
        raise SpecError(f"no plan {number} is remembered: `stretto tune list`")
    click.echo(f"forgot {dropped} plan{'s' if dropped != 1 else ''}")


def _memory(path: Path | None) -> PlanMemory:
    from stretto.tune.memory import VARIABLE, PlanMemory, default_path

    where = path or default_path()
    if where is None:
        raise SpecError(f"{VARIABLE} is off: give --memory FILE")
    return PlanMemory(where, strict=True)


def _row(entry: Remembered) -> dict[str, Any]:
    plan = entry.plan
    return {
        "number": entry.number,
        "name": entry.job.name,
        "at": entry.at,
        "hosts": entry.job.hosts,
        "ranks_per_host": entry.job.ranks_per_host,
        "surroundings": entry.job.surroundings,
        "step_s": entry.step_s,
        "ddp_step_s": entry.ddp_step_s,
        "planner": plan.planner,
        "lanes": plan.lanes,
        "buckets": len(plan.buckets),
    }
