"""``stretto burst``: plan how many GPUs each layer gets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from stretto.cli import (
    _burst_background,
    _burst_profile,
    _burst_scale,
    _planning,
)
from stretto.cli._outputs import OutputCommands, plan_output, writable
from stretto.cli._values import Real, RenamedOption, Whole
from stretto.units import counted, format_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.burst.problem import BurstProblem
    from stretto.schema import Cluster, CollocatedPair
    from stretto.schema.burst import BurstPlan


class Widths(click.ParamType[str | tuple[int, ...]]):
    """Parameter type: a kind of widths, or numbers such as ``1,2,4``."""

    name = "widths"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | tuple[int, ...]:
        """Return the word or the numbers, or raise a usage error."""
        if isinstance(value, tuple) or value in ("powers", "divisors", "all"):
            return value  # type: ignore[no-any-return]
        words = str(value).split(",")
        if not all(word.strip().isdecimal() for word in words):
            self.fail(
                f"powers, divisors, all, or numbers separated by commas, got {value!r}",
                param,
                ctx,
            )
        return tuple(int(word) for word in words)


@click.group(cls=OutputCommands)
def command() -> None:
    """Plan how many GPUs each layer gets (burst parallelism)."""


command.add_command(_burst_profile.profile_command)
command.add_command(_burst_scale.scale_command)


@command.command(name="plan")
@click.argument("profile_file", metavar="PROFILE", type=click.Path())
@click.option("--gpus", type=Whole(min=1), required=True, help="GPUs to use.")
@click.option("--batch", type=Whole(min=1), required=True, help="Samples per step.")
@click.option(
    "--amp-limit",
    "limit",
    type=Real(min=1),
    help="Largest GPU time of a layer, relative to its time on one GPU; at least 1.",
)
@click.option(
    "--front",
    is_flag=True,
    help="Print the Pareto front of step time against GPU time, not one plan, by the "
    "published model's sums.",
)
@click.option(
    "--cluster",
    "cluster_file",
    metavar="CLUSTER",
    help="The network.  [default: the published constants of DeepPool's machine]",
)
@click.option(
    "--cores",
    type=Real(min=0, min_open=True),
    help="Processors that all ranks of an emulated cluster share.",
)
@click.option(
    "--widths",
    type=Widths(),
    default="powers",
    show_default=True,
    help="Numbers of GPUs that a layer may get: powers, divisors, all, or 1,2,4.",
)
@click.option(
    "--collocation",
    "background_file",
    cls=RenamedOption,
    former=("--background",),
    metavar="COLLOCATION",
    help="Add a background job beside each rank: measured pairs, from `stretto run "
    "--collocation`. Needs --cluster.",
)
@click.option(
    "--report",
    "page",
    callback=writable,
    metavar="HTML",
    help="With --front and --collocation: write a page with the plot.",
)
@plan_output
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    profile_file: str,
    gpus: int,
    batch: int,
    limit: float | None,
    front: bool,
    cluster_file: str | None,
    cores: float | None,
    widths: str | tuple[int, ...],
    background_file: str | None,
    page: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Choose the number of GPUs of each layer for the shortest step.

    A layer of PROFILE that gains little from more GPUs gets few, and the others are
    free in the meantime; --amp-limit limits the GPU time that a faster layer may cost.
    With a cluster of up to 64 ranks the step is simulated, including synchronization
    during backward and waiting. Otherwise, and for --front alone, the step is the
    published formula's sum; do not compare it with a simulated step.

    With --collocation it shows the step beside a background job on each rank and the
    background's rate. With --front as well it shows the Pareto front of both.
    """
    from stretto._api import burst
    from stretto.schema import Cluster
    from stretto.schema.burst import LayerProfile

    _check_options(front=front, background=background_file, page=page, output=output)
    _check_cores(
        cores,
        gpus,
        is_simulated=cluster_file is not None and (background_file or not front),
    )
    profile = LayerProfile.load(profile_file)
    cluster = None if cluster_file is None else Cluster.load(cluster_file)
    pairs: tuple[CollocatedPair, ...] = ()
    if background_file is not None:
        cluster = _burst_background.require_cluster(cluster, gpus)
        pairs = _burst_background.load(background_file, profile.name)
    problem = burst.problem(
        profile,
        gpus=gpus,
        batch=batch,
        amplification_limit=limit,
        widths=widths,
        cluster=cluster,
    )
    if front and pairs and cluster is not None:
        _burst_background.show_front(
            problem, cluster, pairs, cores=cores, page=page, as_json=as_json
        )
        return
    _show(problem, cluster, pairs, cores, front=front, output=output, as_json=as_json)


def _check_options(
    *, front: bool, background: str | None, page: str | None, output: str | None
) -> None:
    if front and output is not None:
        raise click.UsageError(
            "-o writes one plan, but --front gives several: choose one of them"
        )
    if page is not None and not (front and background is not None):
        raise click.UsageError("--report needs --front and --collocation")


def _check_cores(cores: float | None, gpus: int, *, is_simulated: Any) -> None:
    """Refuse --cores where no step is simulated, which would ignore it."""
    from stretto._api import burst

    if cores is not None and not (is_simulated and gpus <= burst.MAX_SIMULATED):
        raise click.UsageError(
            "--cores applies to simulated steps only: it needs --cluster, at most "
            f"{burst.MAX_SIMULATED} GPUs, and with --front also --collocation"
        )


def _show(
    problem: BurstProblem,
    cluster: Cluster | None,
    pairs: Sequence[CollocatedPair],
    cores: float | None,
    *,
    front: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Plan and print, with what one plan gives beside each pair's background."""
    from stretto._api import burst

    profile, gpus = problem.profile, problem.gpus
    by_rank: dict[str, Any] = {}
    with _planning.progress(f"planning {profile.name}"):
        begin_s = time.perf_counter()
        if front:
            plans = burst.front(problem)
        elif cluster is None or gpus > burst.MAX_SIMULATED:
            plans = [burst.plan(problem)]
        else:
            found, step = burst.plan_on(problem, cluster, cores=cores)
            plans = [found]
            by_rank["idle_s_by_rank"] = step.idle_s
            if pairs:
                by_rank["beside"] = _burst_background.plan_rows(
                    problem, cluster, pairs, found, step, cores
                )
        search_s = time.perf_counter() - begin_s
    if output is not None:
        plans[0].save(output)
    rows = [_row_of(plan) | {"widest": _widest(problem)} for plan in plans]
    if as_json:
        about = {"profile": profile.name, "gpus": gpus, "batch": problem.batch}
        timed = {"search_s": search_s}
        chosen = {"front": rows} if front else rows[0]
        click.echo(_planning.json_text(about | chosen | by_rank | timed))
    elif front:
        for row in rows:
            click.echo(_summary(row))
    else:
        _print_plan(plans[0], rows[0], by_rank)


def _print_plan(plan: BurstPlan, row: dict[str, Any], by_rank: dict[str, Any]) -> None:
    for entry in plan.layers:
        click.echo(f"{entry.gpus:>6}  {_where(entry.first_gpu)}{entry.layer}")
    click.echo(_summary(row))
    click.echo(_against(row))
    if "idle_s_by_rank" in by_rank:
        idle_s = by_rank["idle_s_by_rank"]
        shown = ", ".join(format_s(seconds) for seconds in idle_s[:16])
        more = " ..." if len(idle_s) > 16 else ""
        click.echo(f"idle by rank: {shown}{more}")
    if "beside" in by_rank:
        click.echo(_burst_background.plan_text(by_rank["beside"]))


def _where(first_gpu: int) -> str:
    return f"from {first_gpu}: " if first_gpu else ""


def _row_of(plan: BurstPlan) -> dict[str, Any]:
    prediction = plan.predicted
    if prediction is None:
        raise AssertionError("a planner's plan has no prediction")
    return {
        "iteration_s": prediction.iteration_s,
        "data_parallel_s": prediction.data_parallel_s,
        "single_width": prediction.single_width,
        "single_width_s": prediction.single_width_s,
        "gpu_s": prediction.gpu_s,
        "idle_gpu_s": prediction.idle_gpu_s,
        "amplification": prediction.amplification,
        "max_amplification": prediction.max_amplification,
        "layers": [
            {"layer": e.layer, "gpus": e.gpus, "first_gpu": e.first_gpu}
            for e in plan.layers
        ],
    }


def _widest(problem: BurstProblem) -> str:
    """Return the most GPUs that a layer can get: ``all GPUs``, or their number."""
    from stretto.cost.burst import samples_on

    batch, widest = problem.batch, problem.widths[-1]
    used = min(problem.gpus, batch)
    if samples_on(batch, widest) != samples_on(batch, used):
        return counted(widest, "GPU")
    return "all GPUs" if used == problem.gpus else counted(used, "GPU")


def _summary(row: dict[str, Any]) -> str:
    return (
        f"step {format_s(row['iteration_s'])} "
        f"(every layer on {row['widest']}: {format_s(row['data_parallel_s'])}), "
        f"GPU time {format_s(row['gpu_s'])}, "
        f"{row['amplification']:.2f} times one GPU's"
    )


def _against(row: dict[str, Any]) -> str:
    step_s = row["iteration_s"]
    faster = row["data_parallel_s"] / step_s if step_s > 0 else 1.0
    best = row["single_width_s"] / step_s if step_s > 0 else 1.0
    return (
        f"idle GPU time {format_s(row['idle_gpu_s'])}; {faster:.2f} times as "
        f"fast as data parallelism on {row['widest']}, "
        f"{best:.2f} times as the best single width, "
        f"{counted(row['single_width'], 'GPU')} "
        f"({format_s(row['single_width_s'])})"
    )
