"""``stretto simulate``: predict what a plan will do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from stretto import _api, planners
from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._values import WholeNumbers
from stretto.schema import Cluster, Plan, Workload


@click.command(cls=OutputCommand, name="simulate")
@click.argument("workload_file", metavar="WORKLOAD", type=click.Path())
@click.argument("cluster_file", metavar="CLUSTER", type=click.Path())
@click.option("--plan", "plan_file", metavar="FILE", help="Simulate this plan.")
@click.option(
    "--planner",
    "names",
    multiple=True,
    metavar="NAME",
    help=_planning.planner_help("Simulate this planner's plan (repeatable)"),
)
@click.option(
    "--ranks",
    type=WholeNumbers(),
    help=(
        "Simulate these numbers of ranks too, such as 16,64,2048; plans again for each."
    ),
)
@click.option(
    "--trace",
    callback=writable,
    metavar="FILE",
    help="Write the timeline, for Perfetto.",
)
@click.option(
    "--report",
    callback=writable,
    metavar="FILE",
    help="Write a page with plots, as HTML.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object, or a list of them for several planners.",
)
@_planning.planner_options
def command(
    workload_file: str,
    cluster_file: str,
    plan_file: str | None,
    names: tuple[str, ...],
    ranks: tuple[int, ...] | None,
    trace: str | None,
    report: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict a step of WORKLOAD on CLUSTER under --plan FILE or --planner NAME."""
    names = tuple(dict.fromkeys(names))
    own = _own_options(names, _chosen(names, plan_file, trace, options))
    for name in names:
        _planning.check_options(name, own[name])
    workload = Workload.load(workload_file)
    cluster = Cluster.load(cluster_file)
    loaded = Plan.load(plan_file) if plan_file is not None else None

    def planned_on(sized: Cluster, name: str) -> Plan:
        if loaded is not None:
            # Only a table over numbers of ranks uses a plan for another number than its
            # own.
            moved = loaded if sized is cluster else replace(loaded, ranks=sized.ranks)
            return _api.with_prediction(moved, workload, sized)
        with (
            _planning.in_flags(name),
            _planning.progress(f"{name} plans {workload.name} on {sized.ranks} ranks"),
        ):
            return _api.plan(workload, sized, name, **own[name])

    if loaded is not None:
        names = (loaded.planner,)
    plans = {name: planned_on(cluster, name) for name in names}
    if trace is not None:
        _api.simulate(workload, cluster, plans[names[0]]).timeline.save(trace)
    rows = [
        _planning.row_on_ranks(plan, workload)
        | {"warnings": _planning.warnings_of(plan, cluster)}
        for plan in plans.values()
    ]
    sizes = [_api.cluster_at(cluster, number) for number in ranks or ()]
    scaling = {
        name: [
            _planning.row_on_ranks(planned_on(sized, name), workload) for sized in sizes
        ]
        for name in names
    }
    if report is not None:
        _planning.save_page(
            report,
            workload,
            cluster,
            plans,
            scaling,
            drawn=names,
            contributions="joint" in names,
        )
    if as_json:
        if ranks:
            several = zip(rows, scaling.values(), strict=True)
            rows = [row | {"scaling": over} for row, over in several]
        click.echo(_planning.json_text(rows if len(rows) > 1 else rows[0]))
        return
    from stretto.report.tables import planners_table

    click.echo(planners_table(rows))
    _planning.print_warnings(plans.values(), cluster)
    for name, over in scaling.items() if ranks else ():
        click.echo(f"\n{name}:" if len(names) > 1 else "")
        click.echo(_planning.scaling_text(over))
    if report is not None:
        click.echo(f"written to {report}")


def _chosen(
    names: tuple[str, ...],
    plan_file: str | None,
    trace: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the planner options that were given.

    Raises:
        UsageError: plan, planners, trace and options do not go together.
    """
    if (plan_file is None) == (not names):
        raise click.UsageError("give either --plan FILE or --planner NAME")
    if trace is not None and len(names) > 1:
        raise click.UsageError("a trace shows one plan: give --planner once")
    chosen = _planning.given(options)
    if plan_file is not None and chosen:
        raise click.UsageError(
            "a planner's options need --planner; a --plan is already made"
        )
    return chosen


def _own_options(
    names: tuple[str, ...], chosen: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options that each planner has.

    An option that no planner has goes to all of them, so that a planner refuses it.
    """
    known = {name: planners.options_of(name) for name in names}
    common = {k for k in chosen if not any(k in has for has in known.values())}
    return {
        name: {k: v for k, v in chosen.items() if k in has or k in common}
        for name, has in known.items()
    }
