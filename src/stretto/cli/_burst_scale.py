"""``stretto burst scale``: compare four methods of scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._tables import aligned
from stretto.cli._values import Real, Whole, WholeNumbers
from stretto.errors import SpecError
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.planners.burst.scaling import ScaledGpus
    from stretto.schema.efficiency import SampleEfficiency


@click.command(cls=OutputCommand, name="scale")
@click.argument("profile_file", metavar="PROFILE", type=click.Path())
@click.option(
    "--efficiency",
    metavar="CURVE",
    required=True,
    help=(
        "Samples to the target by batch: a file (JSON, or CSV with batch,samples), or "
        "critical:BATCH for samples that grow as 1 + batch / BATCH."
    ),
)
@click.option(
    "--batch",
    type=Whole(min=1),
    required=True,
    help="Samples per step on one GPU, and of strong scaling.",
)
@click.option(
    "--gpus",
    type=WholeNumbers(),
    default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096",
    show_default=True,
    help="Numbers of GPUs.",
)
@click.option(
    "--cluster",
    "cluster_file",
    metavar="CLUSTER",
    help="The network.  [default: the published constants of DeepPool's machine]",
)
@click.option(
    "--bandwidth",
    type=Real(min=0, min_open=True),
    help="Gbit/s of each GPU instead of the published machine's.",
)
@click.option(
    "--report",
    "page",
    callback=writable,
    metavar="HTML",
    help="Write a page with the plot.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def scale_command(
    profile_file: str,
    efficiency: str,
    batch: int,
    gpus: tuple[int, ...],
    cluster_file: str | None,
    bandwidth: float | None,
    page: str | None,
    as_json: bool,
) -> None:
    """Compare weak, strong, batch-optimal and burst scaling.

    A speed-up is relative to one GPU with --batch, in time until the target is reached.
    A method has no figure where PROFILE lacks the samples of a GPU, or the curve lacks
    the batch.
    """
    from stretto._api import burst
    from stretto.schema import Cluster
    from stretto.schema.burst import LayerProfile

    if cluster_file is not None and bandwidth is not None:
        raise click.UsageError(
            "--bandwidth conflicts with --cluster, which has a bandwidth: give "
            "one of them"
        )
    profile = LayerProfile.load(profile_file)
    curve = _curve(efficiency)
    cluster = None if cluster_file is None else Cluster.load(cluster_file)
    with _planning.progress(f"planning {profile.name} for {len(gpus)} sizes"):
        rows = burst.scale(
            profile,
            curve,
            batch=batch,
            gpus=gpus,
            cluster=cluster,
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9 / 8,
        )
    network = cluster.name if cluster is not None else "DeepPool's constants"
    if bandwidth is not None:
        network += f" with {bandwidth:g} Gbit/s"
    if page is not None:
        from stretto.report.burst import save_scaling

        save_scaling(
            page, profile=profile, curve=curve, rows=_rows(rows), network=network
        )
    if as_json:
        about = {"profile": profile.name, "efficiency": curve.name, "batch": batch}
        click.echo(_planning.json_text(about | {"scaling": _rows(rows)}))
        return
    click.echo(_text(rows))
    if page is not None:
        click.echo(f"page written to {page}")


def _curve(given: str) -> SampleEfficiency:
    from stretto.schema.efficiency import SampleEfficiency

    kind, _, value = given.partition(":")
    if kind != "critical":
        return SampleEfficiency.load(given)
    try:
        batch = float(value)
    except ValueError as error:
        raise SpecError(
            f"--efficiency critical:BATCH needs a number of samples, got {value!r}"
        ) from error
    return SampleEfficiency(name=f"critical batch {batch:g}", critical_batch=batch)


def _rows(rows: Sequence[ScaledGpus]) -> list[dict[str, Any]]:
    return [
        {
            "gpus": row.gpus,
            "batches": list(row.batches),
            "ways": {
                name: None
                if point is None
                else {
                    "batch": point.batch,
                    "iteration_s": point.iteration_s,
                    "speedup": point.speedup,
                }
                for name, point in row.methods.items()
            },
        }
        for row in rows
    ]


def _text(rows: Sequence[ScaledGpus]) -> str:
    names = list(rows[0].methods)
    lines = [["GPUs", *names]]
    for row in rows:
        cells = [str(row.gpus)]
        for name in names:
            point = row.methods[name]
            cells.append(
                "-"
                if point is None
                else f"{point.speedup:.2f}x "
                f"({point.batch}, {format_s(point.iteration_s)})"
            )
        lines.append(cells)
    tried = sorted({batch for row in rows for batch in row.batches})
    return (
        f"{aligned(lines)}\n"
        "speed-up (samples of a step, time of a step); batches tried: "
        f"{', '.join(map(str, tried)) or 'none'}"
    )
