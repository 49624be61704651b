"""`stretto probe`: measure the process group's network, write a cluster file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stretto import units
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._ranks import process_group, require_ranks
from stretto.cli._values import Real, Sizes, Whole, WholeNumbers
from stretto.errors import SpecError
from stretto.schema import Cluster, codec

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command(cls=OutputCommand)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    callback=writable,
    help="Cluster file to write.",
)
@click.option("--name", default="cluster", show_default=True, help="Cluster's name.")
@click.option(
    "--budget",
    "budget_s",
    type=Real(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time limit in seconds; a short limit makes the grid coarser.",
)
@click.option(
    "--sizes",
    type=Sizes(),
    help="Message sizes, separated by commas.  [default: 1KiB,4KiB,...,16MiB]",
)
@click.option(
    "--lanes",
    type=WholeNumbers(),
    default="1,2,4,8",
    show_default=True,
    help="Numbers of simultaneous all-reduces, separated by commas.",
)
@click.option(
    "--repetitions",
    type=Whole(min=1),
    default=5,
    show_default=True,
    help="Largest number of runs per size.",
)
@click.option(
    "--contention/--no-contention",
    default=True,
    help="Also measure computation beside communication.",
)
@click.option(
    "--resources",
    type=WholeNumbers(),
    help="Measure contention by resource (CTAs on NCCL, connections on Gloo) at these "
    "levels, and fit LIBRA's curves.",
)
@click.option(
    "--synthetic",
    is_flag=True,
    help="Use no ranks: measure only how much computation on this GPU slows beside a "
    "kernel that emulates a collective. Writes no cluster file.",
)
@click.option(
    "--hosts",
    type=Whole(min=1),
    help="Number of hosts.  [default: counted by host name]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Also print the cluster on stdout."
)
def command(
    output: Path | None,
    name: str,
    budget_s: float,
    sizes: tuple[int, ...] | None,
    lanes: tuple[int, ...],
    repetitions: int,
    contention: bool,
    resources: tuple[int, ...] | None,
    synthetic: bool,
    hosts: int | None,
    as_json: bool,
) -> None:
    """Measure the network with all-reduces over sizes and lanes, and fit the model.

    Runs on every rank, so start it as you would start a training script:

    \b
      stretto lab run --hosts 4 --link 1gbit --flow 300mbit -- \\
        stretto probe -o cluster.json
      torchrun --nproc-per-node 4 --no-python stretto probe -o cluster.json

    Rank 0 writes the file.
    """  # noqa: D301
    levels = list(resources or ())
    if synthetic:
        _print_synthetic(levels, budget_s, as_json=as_json)
        return
    if output is None:
        raise SpecError("stretto probe writes a cluster file: name it with -o FILE")
    require_ranks("probe")
    options: dict[str, Any] = {
        "budget_s": budget_s,
        "repetitions": repetitions,
        "contention": contention,
        "lanes": list(lanes),
    }
    if sizes:
        options["sizes_bytes"] = list(sizes)
    with process_group() as rank:
        from stretto._api.measuring import probe, probe_contention

        with _progress(rank) as progress:
            cluster = probe(name=name, hosts=hosts, progress=progress, **options)
            if levels:
                if rank == 0:  # kept if contention turns out to be too noisy
                    cluster.save(output)
                cluster = probe_contention(
                    cluster, resources=levels, budget_s=budget_s, progress=progress
                )
        if rank == 0:
            cluster.save(output)
            if as_json:
                click.echo(codec.encode(cluster).decode(), nl=False)
            click.echo(_summary(cluster, output), err=True)


def _print_synthetic(levels: list[int], budget_s: float, *, as_json: bool) -> None:
    """Measure LIBRA's alpha on one GPU."""
    from stretto._api.measuring import fit_compute, probe_device
    from stretto.measure.contention import DEFAULT_RESOURCES

    readings = probe_device(resources=levels or DEFAULT_RESOURCES, budget_s=budget_s)
    fit = fit_compute(readings)
    report = {
        **readings.provenance,
        "alpha1": fit.value.alpha1,
        "alpha2": fit.value.alpha2,
        "std_errors": fit.std_errors,
        "slowdowns": [
            {
                "resource": reading.resource,
                "compute_alone_s": reading.compute_alone_s,
                "slowdown": reading.compute_overlapped_s / reading.compute_alone_s,
                "residual_ratio": residual,
            }
            for reading, residual in zip(
                readings.slowdowns, fit.residual_ratios, strict=True
            )
        ],
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    for row in report["slowdowns"]:
        click.echo(
            f"{row['resource']:>4} CTAs: computation takes {row['slowdown']:.3f} times "
            f"as long (the line is off by {100 * row['residual_ratio']:+.1f} %)"
        )
    click.echo(
        f"alpha1 {fit.value.alpha1:.4g}, alpha2 {fit.value.alpha2:.4g} per CTA, beside "
        f"{report['communication']}"
    )


class _progress:  # noqa: N801 - used as a function
    """Show a progress bar on rank 0's terminal; print nothing to a pipe."""

    def __init__(self, rank: int) -> None:
        self._bar = None
        if rank == 0 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> Callable[[float, str], None] | None:
        if self._bar is None:
            return None
        bar = self._bar
        bar.start()
        task = bar.add_task("connecting", total=1.0)
        return lambda share, line: bar.update(task, completed=share, description=line)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _summary(cluster: Cluster, output: Path) -> str:
    fit = cluster.provenance["fit"]
    link = cluster.bottleneck
    assert cluster.allreduce is not None  # noqa: S101 - the fit always gives one
    flow = (
        "not capped"
        if link.stream_bytes_per_s is None
        else units.format_rate(link.stream_bytes_per_s)
    )
    reached = "" if fit["link_reached"] else " or more (never saturated)"
    return (
        f"{output}: {units.counted(cluster.ranks, 'rank')} on "
        f"{units.counted(cluster.hosts, 'host')}, start-up "
        f"{units.format_s(cluster.allreduce.startup_s)}, one flow {flow}, link "
        f"{units.format_rate(link.bandwidth_bytes_per_s)}{reached}; the fit differs "
        f"from the samples by {100 * fit['median_error']:.1f} % in the median, "
        f"{100 * fit['worst_error']:.0f} % at worst"
    )
