"""``stretto zoo``: write the papers' models and testbeds as files."""

from __future__ import annotations

import json
from typing import Any

import click

from stretto import zoo
from stretto.cli._outputs import OutputCommands, writable
from stretto.cli._values import Real, Whole
from stretto.units import counted, format_s


@click.group(cls=OutputCommands, name="zoo")
def command() -> None:
    """Write the papers' models and testbeds as files, without a measurement."""


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(as_json: bool) -> None:
    """List the models with their sizes, and the clusters."""
    models = [_row(name) for name in zoo.MODELS]
    clusters = [{"name": n, "about": about} for n, about in zoo.CLUSTERS.items()]
    if as_json:
        click.echo(json.dumps({"models": models, "clusters": clusters}, indent=2))
        return
    click.echo(f"{'model':<18}{'tensors':>8}{'M params':>11}{'GMAC':>10}  sample")
    for row in models:
        click.echo(
            f"{row['name']:<18}{row['tensors']:>8}{row['parameters'] / 1e6:>11.3f}"
            f"{row['macs_per_sample'] / 1e9:>10.2f}  {row['sample']}"
        )
    click.echo()
    for each in clusters:
        click.echo(f"{each['name']:<18}{each['about']}")


@command.command()
@click.argument("name", metavar="NAME")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    callback=writable,
    help="The workload file to write.",
)
@click.option(
    "--batch",
    type=Whole(min=1),
    help="Samples per rank.  [default: that of the published time, or 32]",
)
@click.option(
    "--size",
    type=Whole(1, 65536),
    help="Pixels of an image's side, or tokens of a sequence.",
)
@click.option(
    "--forward-s", type=Real(min=0, min_open=True), help="Measured seconds of forward."
)
@click.option(
    "--backward-s",
    type=Real(min=0, min_open=True),
    help="Measured seconds of backward.",
)
@click.option(
    "--device",
    type=click.Choice(list(zoo.DEVICES)),
    help="Device whose roofline to use.  [default: that of the published time, or "
    "v100]",
)
def show(
    name: str,
    output: str,
    batch: int | None,
    size: int | None,
    forward_s: float | None,
    backward_s: float | None,
    device: str | None,
) -> None:
    """Write model NAME as a workload.

    Its layers' times are those of a roofline, scaled to --forward-s and --backward-s.
    Without these they are scaled to a published time of the model on --device, and
    without one they stay the roofline's.
    """
    if (forward_s is None) != (backward_s is None):
        raise click.UsageError("give both of --forward-s and --backward-s, or neither")
    made = zoo.workload(
        name,
        size=size,
        batch=batch,
        forward_s=forward_s,
        backward_s=backward_s,
        device=device,
    )
    made.save(output)
    click.echo(
        f"{name}: {len(made.tensors)} tensors, {made.total_bytes / 1e6:.1f} MB, batch "
        f"{made.batch_per_rank}, forward {format_s(made.forward_s)}, backward "
        f"{format_s(made.backward_s)} on {made.device} ({made.provenance['times']})"
    )
    click.echo(f"written to {output}")


@command.command()
@click.argument("name", metavar="NAME")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    callback=writable,
    help="The profile file to write.",
)
@click.option(
    "--size",
    type=Whole(1, 65536),
    help="Pixels of an image's side, or tokens of a sequence.",
)
@click.option(
    "--samples",
    multiple=True,
    type=Whole(min=1),
    help="Number of samples on one device (repeatable).",
)
@click.option(
    "--device",
    type=click.Choice(list(zoo.DEVICES)),
    default="a100",
    show_default=True,
    help="Device whose roofline to use.",
)
def layers(
    name: str, output: str, size: int | None, samples: tuple[int, ...], device: str
) -> None:
    """Write model NAME as a layer profile for `stretto burst plan`."""
    chosen = {"samples": samples} if samples else {}
    made = zoo.layer_profile(name, size=size, device=device, **chosen)
    made.save(output)
    counts = [time.samples for time in made.layers[0].times]
    click.echo(
        f"{name}: {len(made.layers)} layers, {made.parameter_bytes / 1e6:.1f} MB, "
        f"{counts[0]} to {counts[-1]} samples on {made.device} "
        f"({made.provenance['times']})"
    )
    click.echo(f"written to {output}")


@command.command()
@click.argument("name", metavar="NAME")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    callback=writable,
    help="The cluster file to write.",
)
@click.option(
    "--hosts",
    type=Whole(min=1),
    help="Number of hosts, instead of the paper's.",
)
def cluster(name: str, output: str, hosts: int | None) -> None:
    """Write the testbed NAME as a cluster."""
    made = zoo.cluster(name, hosts)
    made.save(output)
    click.echo(
        f"{name}: {counted(made.hosts, 'host')} of "
        f"{counted(made.ranks_per_host, 'rank')}"
    )
    for assumed in made.provenance.get("assumed", ()):
        click.echo(f"  assumed: {assumed}")
    if "note" in made.provenance:
        click.echo(f"  note: {made.provenance['note']}")
    click.echo(f"written to {output}")


def _row(name: str) -> dict[str, Any]:
    graph = zoo.model(name)
    return {
        "name": name,
        "tensors": len(graph.parameters),
        "parameters": graph.elements,
        "macs_per_sample": graph.macs,
        "layers": len(graph.layers),
        "sample": graph.sample,
    }
