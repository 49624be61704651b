"""``stretto tune``: plans that earlier runs settled on, or left unfinished."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto import variable_names
from stretto.cli._outputs import OutputCommands, plan_output
from stretto.cli._tables import aligned
from stretto.cli._values import RenamedOption, Whole
from stretto.errors import SpecError
from stretto.units import counted, format_s

if TYPE_CHECKING:
    from stretto.tune.plan_cache import CachedPlan, PlanCache, Unreadable

_WHERE = click.option(
    "--plan-cache",
    "path",
    cls=RenamedOption,
    former=("--memory",),
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"File of kept plans.  [default: {variable_names.PLAN_CACHE}, or plans.sqlite "
    "in the user's cache]",
)
_NUMBER = Whole(1, 2**63 - 1)
"""SQLite's range."""


@click.group(cls=OutputCommands, name="tune")
def command() -> None:
    """Show or delete plans that earlier runs kept.

    Equal jobs start from them.
    """


@command.command(name="list")
@_WHERE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(path: Path | None, as_json: bool) -> None:
    """List the kept plans, newest first, and mark the unfinished ones."""
    from stretto.tune.plan_cache import Unreadable

    entries = _entries(path)
    broken = [entry for entry in entries if isinstance(entry, Unreadable)]
    if as_json:
        plans = [_row(e) for e in entries if not isinstance(e, Unreadable)]
        unreadable = [dataclasses.asdict(entry) for entry in broken]
        click.echo(json.dumps({"plans": plans, "unreadable": unreadable}, indent=2))
        return
    if not entries:
        click.echo("no plans are kept yet")
        return
    lines = [["number", "model", "ranks", "step", "DDP", "kept (UTC)", "state"]]
    for entry in entries:
        if isinstance(entry, Unreadable):
            cells = ["-", "-", "-", entry.at, "unreadable"]
            lines.append([str(entry.number), entry.name, *cells])
            continue
        lines.append(
            [
                str(entry.number),
                entry.job.name,
                f"{entry.job.hosts} x {entry.job.ranks_per_host}",
                format_s(entry.step_s),
                "-" if entry.ddp_step_s is None else format_s(entry.ddp_step_s),
                entry.at,
                _state(entry),
            ]
        )
    click.echo(aligned(lines, left=(1, 2, 6)))
    for entry in broken:
        click.echo(_unreadable(entry), err=True)


@command.command()
@click.argument("number", type=_NUMBER)
@_WHERE
@plan_output
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(number: int, path: Path | None, output: str | None, as_json: bool) -> None:
    """Show the plan NUMBER of the list.

    -o saves it for `stretto run --plan`.
    """
    from stretto.tune.plan_cache import CachedPlan

    for entry in _entries(path):
        if entry.number == number:
            break
    else:
        raise _unknown(number)
    if not isinstance(entry, CachedPlan):
        raise SpecError(_unreadable(entry))
    if output is not None:
        entry.plan.save(output)
    row = _row(entry)
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    from stretto.report.tables import plan_table

    click.echo(f"{row['name']} on {row['hosts']} x {row['ranks_per_host']} ranks")
    environment = row["environment"]
    click.echo(f"{_state(entry)}, {row['at']} UTC in {environment}")
    ddp_s = entry.ddp_step_s
    against = "" if ddp_s is None else f", DDP's {format_s(ddp_s)}"
    click.echo(f"measured step {format_s(entry.step_s)}{against}")
    click.echo(plan_table(entry.plan, entry.workload))


@command.command()
@click.argument("number", type=_NUMBER, required=False)
@click.option("--all", "everything", is_flag=True, help="Forget all plans.")
@_WHERE
def forget(number: int | None, everything: bool, path: Path | None) -> None:
    """Forget the plan NUMBER of the list, or with --all every plan."""
    if (number is None) == (not everything):
        raise click.UsageError("give the NUMBER of a plan, or --all")
    cache = _cache(path)
    # Entries are not read, so that unreadable ones can be forgotten, too.
    dropped = 0 if cache is None else cache.delete(number)
    if number is not None and not dropped:
        raise _unknown(number)
    click.echo(f"forgot {counted(dropped, 'plan')}")


def _entries(path: Path | None) -> list[CachedPlan | Unreadable]:
    cache = _cache(path)
    return [] if cache is None else cache.all()


def _cache(path: Path | None) -> PlanCache | None:
    """Return the plans of a file, or ``None`` if no run has created it yet.

    Reading must not create a file, especially if its name was mistyped.
    """
    from stretto.tune import PlanCache
    from stretto.tune.plan_cache import default_path

    where = path or default_path()
    if where is None:
        raise SpecError(
            f"{variable_names.PLAN_CACHE} is off or there is no home: give "
            "--plan-cache FILE"
        )
    if where.exists():
        return PlanCache(where, strict=True)
    if path is not None:
        raise SpecError(
            f"{path}: no such file. Give --plan-cache the file that "
            f"{variable_names.PLAN_CACHE} named in the training"
        )
    return None


def _state(entry: CachedPlan) -> str:
    steps = entry.unfinished_steps
    return "settled" if steps is None else f"unfinished after {steps} steps"


def _unreadable(entry: Unreadable) -> str:
    return (
        f"entry {entry.number} cannot be read: {entry.why}. `stretto tune forget "
        f"{entry.number}` removes it"
    )


def _unknown(number: int) -> SpecError:
    return SpecError(f"there is no plan {number}: see `stretto tune list`")


def _row(entry: CachedPlan) -> dict[str, Any]:
    plan = entry.plan
    return {
        "number": entry.number,
        "name": entry.job.name,
        "at": entry.at,
        "hosts": entry.job.hosts,
        "ranks_per_host": entry.job.ranks_per_host,
        "environment": entry.job.environment,
        "step_s": entry.step_s,
        "ddp_step_s": entry.ddp_step_s,
        "unfinished_steps": entry.unfinished_steps,
        "planner": plan.planner,
        "lanes": plan.lanes,
        "buckets": len(plan.buckets),
    }
