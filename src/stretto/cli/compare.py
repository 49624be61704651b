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
def command(workload_file: str, cluster_file: str, as_json: bool) -> None:
    """Plans WORKLOAD on CLUSTER with every planner and predicts each plan."""
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
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
