"""Output of ``stretto burst plan --collocation``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from stretto.cli import _planning
from stretto.units import counted, format_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.burst.collocated import CollocatedPlan, Partition
    from stretto.planners.burst.problem import BurstProblem
    from stretto.schema import Cluster, CollocatedPair, Collocation
    from stretto.schema.burst import BurstPlan
    from stretto.sim.burst import BurstStep


def load(path: str, profile_name: str) -> tuple[CollocatedPair, ...]:
    """Return the pairs of a file that apply to a profile; warn if none is its own."""
    from stretto.schema import Collocation

    found: Collocation = Collocation.load(path)
    pairs = found.rows_for(profile_name)
    if pairs[0].foreground != profile_name:
        names = ", ".join(dict.fromkeys(pair.foreground for pair in pairs))
        click.echo(
            f"warning: {path}: has no pair with the foreground {profile_name!r}: loss "
            f"and share are those of {names}",
            err=True,
        )
    for pair in pairs:
        if pair.doubt:
            click.echo(
                f"warning: {path}: {pair.title}: {pair.doubt}, so other work disturbed "
                "the run. Measure again on a quiet machine",
                err=True,
            )
    return pairs


def require_cluster(cluster: Cluster | None, gpus: int) -> Cluster:
    """Return the cluster on which steps are simulated, or raise a usage error."""
    from stretto._api import burst

    if cluster is None:
        raise click.UsageError(
            "--collocation needs --cluster: idle windows are those of a simulated "
            "step. `stretto zoo cluster deeppool -o cluster.json` writes DeepPool's"
        )
    if gpus > burst.MAX_SIMULATED:
        raise click.UsageError(
            f"--collocation simulates at most {burst.MAX_SIMULATED} GPUs, got {gpus}"
        )
    return cluster


def plan_rows(
    problem: BurstProblem,
    cluster: Cluster,
    pairs: Sequence[CollocatedPair],
    plan: BurstPlan,
    step: BurstStep,
    cores: float | None,
) -> list[dict[str, Any]]:
    """Return what one plan gives beside each pair's background."""
    from stretto._api.burst import collocated

    limit = problem.amplification_limit
    one = collocated.SimulatedPlan(limit=limit, plan=plan, step=step)
    alone_s = step.iteration_s
    if limit is not None:
        alone_s = collocated.alone_s(problem, cluster, [one], cores=cores)
    rows = []
    for pair in pairs:
        (found,) = collocated.beside([one], pair, alone_s)
        windows = {
            "windows_by_rank": [len(some) for some in step.windows],
            "longest_window_s": max(
                (window.length_s for some in step.windows for window in some),
                default=0.0,
            ),
        }
        rows.append(_pair(pair) | _row(found) | windows)
    return rows


def plan_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `plan_rows` as text."""
    from stretto.report.burst import measured_text

    lines = []
    for row in rows:
        by_rank = row["background_by_rank"]
        shown = ", ".join(f"{rate:.2f}" for rate in by_rank[:16])
        more = " ..." if len(by_rank) > 16 else ""
        lines += [
            f"{row['background']}: {_totals(row)}",
            measured_text(row["measured"]),
            f"background's rate over its rate alone by rank: {shown}{more}",
        ]
        if (why := _no_window_text(row)) is not None:
            lines.append(why)
    return "\n".join(lines)


def _no_window_text(row: dict[str, Any]) -> str | None:
    """Return why the background runs in none of the plan's windows, or None."""
    from stretto.schema.collocation import FITS

    measured = row["measured"]
    longest_s = row["longest_window_s"]
    if measured["policy"] != FITS or longest_s >= measured["task_s"]:
        return None
    return (
        f"no window of this plan fits a task of {format_s(measured['task_s'])}: the "
        f"longest is {format_s(longest_s)}. Use shorter tasks (`stretto run "
        "--background ... --segments layer`) or a lower --amp-limit"
    )


def show_front(
    problem: BurstProblem,
    cluster: Cluster,
    pairs: Sequence[CollocatedPair],
    *,
    cores: float | None,
    page: str | None,
    as_json: bool,
) -> None:
    """Print the front of foreground time and background rate for each pair."""
    from stretto._api.burst import collocated

    profile = problem.profile
    with _planning.progress(f"planning {profile.name} over amplification limits"):
        plans = collocated.plans_over_limits(problem, cluster, cores=cores)
        alone_s = collocated.alone_s(problem, cluster, plans, cores=cores)
        parts = collocated.partitions(problem, cluster, alone_s, cores=cores)
    fronts = [
        collocated.front_of(collocated.beside(plans, pair, alone_s)) for pair in pairs
    ]
    found = {
        "profile": profile.name,
        "gpus": problem.gpus,
        "batch": problem.batch,
        "alone_s": alone_s,
        "pairs": [
            _pair(pair) | {"front": [_row(plan) for plan in front]}
            for pair, front in zip(pairs, fronts, strict=True)
        ],
        "partitions": [_partition(part) for part in parts],
    }
    if page is not None:
        from stretto.report.burst import save_collocation

        save_collocation(page, found=found, network=cluster.name)
    click.echo(_planning.json_text(found) if as_json else _text(found))
    if page is not None and not as_json:
        click.echo(f"page written to {page}")


def _pair(pair: CollocatedPair) -> dict[str, Any]:
    return {"background": pair.title, "measured": asdict(pair)}


def _row(found: CollocatedPlan) -> dict[str, Any]:
    return {
        "amplification_limit": found.limit,
        "alone_s": found.alone_s,
        "iteration_s": found.step.iteration_s,
        "foreground_rate": found.foreground,
        "background_rate": found.step.background,
        "background_by_rank": found.step.background_by_rank,
        "total": found.total,
    }


def _partition(part: Partition) -> dict[str, Any]:
    return {
        "gpus": part.gpus,
        "iteration_s": part.iteration_s,
        "foreground_rate": part.foreground,
        "background_rate": part.background,
        "total": part.total,
    }


def _totals(row: dict[str, Any]) -> str:
    return (
        f"step {format_s(row['iteration_s'])} (alone {format_s(row['alone_s'])}), "
        f"foreground {row['foreground_rate']:.2f} + background "
        f"{row['background_rate']:.2f} = {row['total']:.2f} of each job's rate alone"
    )


def _text(found: dict[str, Any]) -> str:
    from stretto.report.burst import front_cells, measured_text
    from stretto.report.tables import plain_table

    lines = []
    for pair in found["pairs"]:
        lines += [pair["background"], measured_text(pair["measured"])]
        lines += [plain_table(*front_cells(pair["front"])), ""]
    heads, cells = front_cells(found["partitions"])
    lines += ["static partition", plain_table(heads, cells), ""]
    lines.append(
        "Rates are over those of each job alone; the foreground's step alone is "
        f"{format_s(found['alone_s'])} on {counted(found['gpus'], 'GPU')}."
    )
    return "\n".join(lines)
