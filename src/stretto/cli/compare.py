"""``stretto compare``: all planners on one workload and cluster."""

from __future__ import annotations

import time
from typing import Any

import click

from stretto import _api, planners
from stretto.cli import _planning
from stretto.schema import Cluster, Workload


@click.command(name="compare")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.argument("cluster_file", metavar="CLUSTER", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="print a JSON list of objects")
@click.option(
    "--contributions",
    is_flag=True,
    help="instead: joint's step with fusion alone, then with lanes too, and so on",
)
def command(
    workload_file: str, cluster_file: str, as_json: bool, contributions: bool
) -> None:
    """Plans WORKLOAD on CLUSTER with every planner and predicts each plan."""
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
    if contributions:
        _contributions(workload, cluster, as_json=as_json)
        return
    rows: list[dict[str, Any]] = []
    for name in planners.NAMES:
        with _planning.progress(f"planning {workload.name} with {name}"):
            begin_s = time.perf_counter()
            plan = _api.plan(workload, cluster, name)
            search_s = time.perf_counter() - begin_s
        rows.append(_planning.row_of(plan) | {"search_s": search_s})
    if as_json:
        click.echo(_planning.json_text(rows))
        return
    from stretto.report.tables import planners_table

    click.echo(planners_table(rows))


def _contributions(workload: Workload, cluster: Cluster, *, as_json: bool) -> None:
    with _planning.progress(f"planning {workload.name} with more and more to choose"):
        rows = _api.contributions(workload, cluster)
    if as_json:
        objects = [{"dimension": n, "iteration_s": value_s} for n, value_s in rows]
        click.echo(_planning.json_text(objects))
        return
    from stretto.report.tables import contributions_table

    click.echo(contributions_table(rows))
