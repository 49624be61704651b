"""`stretto profile`: measure a training script, write a workload file."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stretto import units
from stretto.cli._outputs import OutputCommand, writable
from stretto.cli._programs import program_errors
from stretto.cli._values import Real, Whole
from stretto.schema import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.schema import Workload

_ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free one
}
"""The environment of a script that a launcher starts as its only rank."""


@click.command(
    cls=OutputCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    callback=writable,
    help="Workload file to write.",
)
@click.option("--name", help="Name of the workload.  [default: the script's]")
@click.option(
    "--steps",
    type=Whole(min=3),
    default=10,
    show_default=True,
    help="Steps that count.",
)
@click.option(
    "--warmup",
    type=Whole(min=0),
    default=3,
    show_default=True,
    help="Steps before them.",
)
@click.option(
    "--batch",
    type=Whole(min=1),
    help="Samples per step and rank.  [default: taken from the model's input]",
)
@click.option(
    "--max-spread",
    type=Real(min=0),
    default=0.35,
    show_default=True,
    help=(
        "Largest distance between the quartiles of backward's time, relative to its "
        "median."
    ),
)
@click.option(
    "--json", "as_json", is_flag=True, help="Also print the workload on stdout."
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Path,
    name: str | None,
    steps: int,
    warmup: int,
    batch: int | None,
    max_spread: float,
    as_json: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Measure a job: run SCRIPT, observe its first steps, and stop it.

    The script must make at least 15 steps: 3 of --warmup, 10 of --steps, and the first
    and the last step of the run, which can't be measured completely. It needs no
    change. Put stretto's options before it and its own options after it. A
    DistributedDataParallel in it does not exchange gradients while it is measured, so
    anything that the script writes in these steps is useless. Under torchrun or
    `stretto lab run` every rank runs this command and rank 0 writes the file; without a
    launcher the script runs as the only rank.
    """
    # Imported here: `stretto profile --help` must not wait for torch.
    from stretto.measure import profile_script

    rank = int(os.environ.get("RANK", "0"))
    total = warmup + steps

    def report(count: int) -> None:
        if rank == 0 and sys.stderr.isatty():
            end = "\n" if count == total else ""
            click.echo(f"\rstep {count} of {total}{end}", nl=False, err=True)

    with _launched(), program_errors():
        workload = profile_script(
            script,
            arguments,
            name=name,
            batch_per_rank=batch,
            warmup=warmup,
            repetitions=steps,
            max_spread_ratio=max_spread,
            on_step=report,
        )
    if rank == 0:
        workload.save(output)
        if as_json:
            click.echo(codec.encode(workload).decode(), nl=False)
        click.echo(_summary(workload, output), err=True)


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Set what a launcher of one rank sets, unless a launcher has set any of it."""
    missing = {} if _ONE_RANK.keys() & os.environ.keys() else _ONE_RANK
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _summary(workload: Workload, output: Path) -> str:
    spread = workload.provenance["backward_spread_ratio"]
    return (
        f"{output}: {units.counted(len(workload.tensors), 'tensor')}, "
        f"{units.format_bytes(workload.total_bytes)}, backward "
        f"{units.format_s(workload.backward_s)} (spread {100 * spread:.0f} %), rest of "
        f"a step {units.format_s(workload.forward_s)}"
    )
