"""``stretto burst profile``: measure a module's layers, write a layer profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stretto.cli import _planning
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._programs import program_errors
from stretto.cli._values import Real, Whole
from stretto.units import format_bytes, format_s

if TYPE_CHECKING:
    from stretto.schema.burst import LayerProfile


@click.command(cls=OutputCommand, name="profile")
@click.argument("factory", metavar="FACTORY")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    callback=writable,
    help="Layer profile to write.",
)
@click.option("--gpus", type=Whole(min=1), required=True, help="GPUs to use.")
@click.option("--batch", type=Whole(min=1), required=True, help="Samples per step.")
@click.option(
    "--widths",
    type=click.Choice(["powers", "divisors", "all"]),
    default="powers",
    show_default=True,
    help="Numbers of GPUs that a layer may get.",
)
@click.option(
    "--rounds",
    type=Whole(min=2),
    default=10,
    show_default=True,
    help="Rounds that count.",
)
@click.option(
    "--warmup",
    type=Whole(min=0),
    default=2,
    show_default=True,
    help="Rounds before them.",
)
@click.option(
    "--max-spread",
    type=Real(min=0),
    default=0.35,
    show_default=True,
    help=(
        "Largest distance between the quartiles of the step's time, relative to its "
        "median."
    ),
)
@click.option("--name", help="Name of the profile.  [default: the module's class]")
def profile_command(
    factory: str,
    output: Path,
    gpus: int,
    batch: int,
    widths: str,
    rounds: int,
    warmup: int,
    max_spread: float,
    name: str | None,
) -> None:
    """Measure the layers of the model that FACTORY makes.

    FACTORY is PATH.py:FUNCTION or MODULE:FUNCTION. Called without arguments, the
    function returns the model, example inputs as a tuple or as a dictionary of keyword
    arguments, and optionally a function from the output to the loss and one from
    parameters to an optimizer.
    """
    from stretto.burst.profiling.factory import made_by

    with program_errors():
        model, (inputs, kwargs), loss, optimizer = made_by(factory)
    from stretto._api import burst

    with program_errors(), _planning.progress(f"measuring {type(model).__name__}"):
        found = burst.profile(
            model,
            inputs,
            kwargs=kwargs,
            gpus=gpus,
            batch=batch,
            widths=widths,
            loss=loss,
            optimizer=optimizer,
            name=name,
            repetitions=rounds,
            warmup=warmup,
            max_spread_ratio=max_spread,
        )
    found.save(output)
    for line in _lines(found):
        click.echo(line)
    click.echo(f"written to {output}")


def _lines(profile: LayerProfile) -> list[str]:
    counts = [time.samples for time in profile.whole]
    lines = [
        (
            f"{profile.name}: {len(profile.layers)} layers, "
            f"{format_bytes(profile.parameter_bytes)}, on {profile.device}"
        )
    ]
    for whole in profile.whole:
        over = profile.provenance["layers_over_whole"][str(whole.samples)]
        factor = profile.provenance["scaled_by"].get(str(whole.samples))
        scaled = "" if factor is None else f", so scaled by {factor:.3f}"
        lines.append(
            f"{whole.samples:>6} samples: forward {format_s(whole.forward_s)}, "
            f"backward {format_s(whole.backward_s)}; the layers' sum is {over:.1%} "
            f"of it{scaled}"
        )
    longest = sorted(
        profile.layers, key=lambda layer: layer.compute_s(counts[-1]), reverse=True
    )
    for layer in longest[:5]:
        longest_s = layer.compute_s(counts[-1])
        shortest_s = layer.compute_s(counts[0])
        times = f"{format_s(longest_s):>12} to {format_s(shortest_s):>10}"
        lines.append(f"{times}  {layer.name}")
    return lines
