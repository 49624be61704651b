"""``stretto compare``: compare all planners on one workload and cluster."""

from __future__ import annotations

from typing import Any

import click

from stretto import _api, planners
from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._values import WholeNumbers
from stretto.schema import Cluster, Plan, Workload

SCALED = ("ddp", "mg-wfbp", "fusion", "joint")
"""The planners that plan again for each number of ranks."""


@click.command(cls=OutputCommand, name="compare")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.argument("cluster_file", metavar="CLUSTER", type=click.Path())
@click.option(
    "--ranks",
    type=WholeNumbers(),
    help=(
        "Also plan for these numbers of ranks, such as 16,64,2048, with these "
        f"planners: {', '.join(SCALED)}."
    ),
)
@click.option(
    "--report",
    metavar="FILE",
    callback=writable,
    help="Write a page with plots, as HTML.",
)
@click.option(
    "--planner",
    "others",
    multiple=True,
    metavar="NAME",
    help=(
        "Also compare this planner, for instance exhaustive or an installed package's "
        "(repeatable)."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
@click.option(
    "--contributions",
    is_flag=True,
    help=(
        "Instead, print joint's step with fusion alone, then with lanes added, and so "
        "on."
    ),
)
def command(
    workload_file: str,
    cluster_file: str,
    ranks: tuple[int, ...] | None,
    report: str | None,
    others: tuple[str, ...],
    as_json: bool,
    contributions: bool,
) -> None:
    """Plan WORKLOAD on CLUSTER with every planner and predict each plan."""
    if contributions and (ranks or report):
        raise click.UsageError(
            "--contributions cannot be combined with --ranks or --report; a "
            "--report includes them"
        )
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
    if contributions:
        _contributions(workload, cluster, as_json=as_json)
        return
    names = dict.fromkeys((*planners.NAMES, *others))
    for name in names:
        planners.get(name)  # an unknown one is refused before the work
    sizes = [_api.cluster_at(cluster, number) for number in ranks or ()]
    rows: list[dict[str, Any]] = []
    plans: dict[str, Plan] = {}
    for name in names:
        with _planning.progress(f"planning {workload.name} with {name}"):
            plans[name], search_s = _api.timed_plan(workload, cluster, name)
        rows.append(_planning.row_of(plans[name]) | {"search_s": search_s})
        rows[-1]["warnings"] = _planning.warnings_of(plans[name], cluster)
    scaling = _scaling(workload, sizes) if ranks else {}
    if report is not None:
        fastest = min(rows, key=lambda row: float(row["iteration_s"]))["planner"]
        _planning.save_page(
            report,
            workload,
            cluster,
            plans,
            scaling,
            drawn=dict.fromkeys(("ddp", fastest)),
            contributions=True,
        )
    if as_json:
        for row in rows:
            if row["planner"] in scaling:
                row["scaling"] = scaling[row["planner"]]
        click.echo(_planning.json_text(rows))
        return
    from stretto.report.tables import planners_table

    click.echo(planners_table(rows))
    _planning.print_warnings(plans.values(), cluster)
    for name, over in scaling.items():
        click.echo(f"\n{name}:")
        click.echo(_planning.scaling_text(over))
    if report is not None:
        click.echo(f"written to {report}")


def _scaling(
    workload: Workload, sizes: list[Cluster]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each of `SCALED` over the clusters."""
    out: dict[str, list[dict[str, Any]]] = {name: [] for name in SCALED}
    for sized in sizes:
        with _planning.progress(f"planning {workload.name} for {sized.ranks} ranks"):
            for name, rows in out.items():
                plan = _api.plan(workload, sized, name)
                rows.append(_planning.row_on_ranks(plan, workload))
    return out


def _contributions(workload: Workload, cluster: Cluster, *, as_json: bool) -> None:
    with _planning.progress(f"planning {workload.name} with more and more dimensions"):
        rows = _api.contributions(workload, cluster)
    if as_json:
        objects = [{"dimension": n, "iteration_s": value_s} for n, value_s in rows]
        click.echo(_planning.json_text(objects))
        return
    from stretto.report.tables import contributions_table

    click.echo(contributions_table(rows))
