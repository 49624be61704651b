"""``stretto plan``: make a plan for a workload on a cluster."""

from __future__ import annotations

from typing import Any

import click

from stretto import _api
from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, plan_output
from stretto.schema import NARROWER, Cluster, Workload


@click.command(cls=OutputCommand, name="plan")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.argument("cluster_file", metavar="CLUSTER", type=click.Path())
@click.option(
    "--planner",
    default="joint",
    show_default=True,
    help=_planning.planner_help("Planner"),
)
@plan_output
@click.option(
    "--wire-dtype",
    type=click.Choice(sorted({n for narrower in NARROWER.values() for n in narrower})),
    help="Send gradients as this type, narrower than their own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_planning.planner_options
def command(
    workload_file: str,
    cluster_file: str,
    planner: str,
    output: str | None,
    wire_dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a step of WORKLOAD on CLUSTER and predict it.

    Prints the plan's buckets and its predicted times beside the bound that no plan can
    beat; -o saves the plan for `stretto run --plan`.
    """
    chosen = _planning.given(options)
    _planning.check_options(planner, chosen)
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
    with (
        _planning.in_flags(planner),
        _planning.progress(f"planning {workload.name} with {planner}"),
    ):
        plan, search_s = _api.timed_plan(
            workload, cluster, planner, wire_dtype=wire_dtype, **chosen
        )
    if output is not None:
        plan.save(output)
    row = _planning.row_of(plan) | {"search_s": search_s}
    row["warnings"] = _planning.warnings_of(plan, cluster)
    if as_json:
        click.echo(_planning.json_text(row))
        return
    from stretto.report.tables import plan_table, planners_table

    click.echo(plan_table(plan, workload))
    click.echo()
    click.echo(planners_table([row]))
    _planning.print_warnings([plan], cluster)
