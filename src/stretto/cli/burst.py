"""``stretto burst``: how many GPUs each layer gets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from stretto.cli import _planning
from stretto.units import format_s

if TYPE_CHECKING:
    from stretto.schema.burst import BurstPlan


@click.group()
def command() -> None:
    """How many GPUs each layer gets."""


@command.command(name="plan")
@click.argument("profile_file", metavar="PROFILE", type=click.Path())
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="GPUs to use.")
@click.option(
    "--batch", type=click.IntRange(min=1), required=True, help="Samples of a step."
)
@click.option(
    "--amp-limit",
    "limit",
    type=float,
    help="the most GPU time of a layer, against its time on one GPU",
)
@click.option(
    "--front", is_flag=True, help="all best pairs of time and GPU time, not one plan"
)
@click.option(
    "--cluster",
    "cluster_file",
    metavar="CLUSTER",
    help="the network; without it the published constants of DeepPool's machine",
)
@click.option(
    "--widths",
    type=click.Choice(["powers", "divisors", "all"]),
    default="powers",
    show_default=True,
    help="the numbers of GPUs a layer may get",
)
@click.option("-o", "--output", metavar="PLAN", help="write the plan to this file")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def plan_command(
    profile_file: str,
    gpus: int,
    batch: int,
    limit: float | None,
    front: bool,
    cluster_file: str | None,
    widths: str,
    output: str | None,
    as_json: bool,
) -> None:
    """Chooses the GPUs of each layer of PROFILE, for the shortest step.

    A layer that gains little from more GPUs gets few, and the others are free
    meanwhile; --amp-limit says how much GPU time a layer's speed may cost.
    """
    from stretto._api import burst
    from stretto.schema import Cluster
    from stretto.schema.burst import LayerProfile

    if front and output is not None:
        raise click.UsageError(
            "-o writes one plan, --front gives several: choose one of them"
        )
    profile = LayerProfile.load(profile_file)
    cluster = None if cluster_file is None else Cluster.load(cluster_file)
    with _planning.progress(f"planning {profile.name}"):
        begin_s = time.perf_counter()
        problem = burst.problem(
            profile,
            gpus=gpus,
            batch=batch,
            amplification_limit=limit,
            widths=widths,
            cluster=cluster,
        )
        plans = burst.front(problem) if front else [burst.plan(problem)]
        search_s = time.perf_counter() - begin_s
    if output is not None:
        plans[0].save(output)
    rows = [_row_of(plan) for plan in plans]
    if as_json:
        about = {"profile": profile.name, "gpus": gpus, "batch": batch}
        timed = {"search_s": search_s}
        chosen = {"front": rows} if front else rows[0]
        click.echo(_planning.json_text(about | chosen | timed))
        return
    if front:
        for row in rows:
            click.echo(_summary(row))
        return
    for entry in plans[0].layers:
        click.echo(f"{entry.gpus:>6}  {entry.layer}")
    click.echo(_summary(rows[0]))


def _row_of(plan: BurstPlan) -> dict[str, Any]:
    prediction = plan.predicted
    if prediction is None:
        raise AssertionError("a planner's plan carries its prediction")
    return {
        "iteration_s": prediction.iteration_s,
        "data_parallel_s": prediction.data_parallel_s,
        "gpu_s": prediction.gpu_s,
        "amplification": prediction.amplification,
        "max_amplification": prediction.max_amplification,
        "layers": [
            {"layer": e.layer, "gpus": e.gpus, "first_gpu": e.first_gpu}
            for e in plan.layers
        ],
    }


def _summary(row: dict[str, Any]) -> str:
    return (
        f"step {format_s(row['iteration_s'])} "
        f"(every layer on all GPUs: {format_s(row['data_parallel_s'])}), "
        f"GPU time {format_s(row['gpu_s'])}, "
        f"{row['amplification']:.2f} times one GPU's"
    )
