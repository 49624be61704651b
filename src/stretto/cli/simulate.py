"""``stretto simulate``: what a plan will do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from stretto import _api
from stretto.cli import _planning
from stretto.schema import Cluster, Plan, Workload
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankList(click.ParamType[tuple[int, ...]]):
    """Numbers of ranks: ``16,64,2048``."""

    name = "ranks"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, ...]:
        """The numbers, or a usage error."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"numbers above 0 with commas between, got {value!r}", param, ctx)
        return tuple(int(word) for word in words)


@click.command(name="simulate")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.argument("cluster_file", metavar="CLUSTER", type=click.Path())
@click.option("--plan", "plan_file", metavar="FILE", help="simulate this plan")
@click.option("--planner", help="simulate what this planner plans")
@click.option(
    "--ranks",
    type=RankList(),
    help="also on so many ranks, as 16,64,2048; a planner plans anew for each",
)
@click.option("--trace", metavar="FILE", help="write the timeline, for Perfetto")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@_planning.planner_options
def command(
    workload_file: str,
    cluster_file: str,
    plan_file: str | None,
    planner: str | None,
    ranks: tuple[int, ...] | None,
    trace: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predicts a step of WORKLOAD on CLUSTER under --plan FILE or --planner NAME."""
    if (plan_file is None) == (planner is None):
        raise click.UsageError("give one of --plan FILE and --planner NAME")
    chosen = _planning.given(options)
    if plan_file is not None and chosen:
        raise click.UsageError("a planner's options go with --planner, not with --plan")
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
    loaded = Plan.load(plan_file) if plan_file is not None else None

    def planned_on(sized: Cluster) -> Plan:
        if loaded is not None:
            # Only a table over numbers of ranks takes a plan to others than its own.
            moved = loaded if sized is cluster else replace(loaded, ranks=sized.ranks)
            return _api.predicted(workload, sized, moved)
        with _planning.progress(f"planning {workload.name} for {sized.ranks} ranks"):
            return _api.plan(workload, sized, str(planner), **chosen)

    plan = planned_on(cluster)
    if trace is not None:
        _api.simulate(workload, cluster, plan).timeline.save(trace)
    row = _row(plan, workload)
    scaling = [
        _row(planned_on(_api.resized(cluster, number)), workload)
        for number in ranks or ()
    ]
    if as_json:
        extra = {"scaling": scaling} if ranks else {}
        click.echo(_planning.json_text(row | extra))
        return
    from stretto.report.tables import planners_table

    click.echo(planners_table([row]))
    if scaling:
        click.echo()
        click.echo(_scaling_text(scaling))


def _row(plan: Plan, workload: Workload) -> dict[str, Any]:
    """A plan's row, with the share of the step in which there is computation to do."""
    row = _planning.row_of(plan)
    compute_s = workload.forward_s + workload.backward_s
    iteration_s = row["iteration_s"]
    efficiency = compute_s / iteration_s if iteration_s > 0 else 1.0
    return row | {"ranks": plan.ranks, "efficiency": efficiency}


def _scaling_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [("ranks", "step", "efficiency", "over bound", "lanes", "buckets")]
    lines += [
        (
            str(row["ranks"]),
            format_s(row["iteration_s"]),
            f"{row['efficiency']:.1%}",
            f"{row['gap']:.1%}",
            str(row["lanes"]),
            str(row["buckets"]),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
