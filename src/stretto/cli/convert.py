"""``stretto convert``: training code for one device becomes distributed code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stretto.convert import Choices, Conversion, Evaluation, Target, convert_bytes
from stretto.errors import SpecError

CHANGES_FOUND = 3
"""Exit code of --check where something would change."""


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="write the converted script here; without it nothing is written",
)
@click.option("--force", is_flag=True, help="overwrite an output file that exists")
@click.option(
    "--to",
    "target",
    type=click.Choice([t.value for t in Target]),
    default=Target.STRETTO.value,
    show_default=True,
    help="what the converted script trains with",
)
@click.option(
    "--evaluate",
    type=click.Choice([e.value for e in Evaluation]),
    default=Evaluation.ALL.value,
    show_default=True,
    help="who evaluates: all ranks share the batches, or rank 0 takes them",
)
@click.option(
    "--per-rank",
    is_flag=True,
    help="batch sizes are each rank's, instead of all ranks' together",
)
@click.option(
    "--check",
    is_flag=True,
    help="write nothing; exit with 3 when something would change",
)
def command(
    script: Path,
    output: Path | None,
    force: bool,
    target: str,
    evaluate: str,
    per_rank: bool,
    check: bool,
) -> None:
    """Turn SCRIPT (or a notebook), written for one device, into a distributed one.

    Shows the changes as a unified diff, and a list of what was done, what could not be
    decided and what is good to know, with the lines of SCRIPT. What is not understood
    is refused. Converting a converted script changes nothing.
    """
    choices = Choices(
        target=Target(target),
        evaluation=Evaluation(evaluate),
        per_rank_batch=per_rank,
    )
    if output is not None and check:
        raise click.UsageError("--check writes nothing: leave -o out")
    if output is not None:
        _check_output(output, force=force)
    conversion = convert_bytes(_bytes(script), name=script.name, choices=choices)
    click.echo(conversion.diff(), nl=False)
    if listed := conversion.listed():
        click.echo(listed)
    if check:
        sys.exit(CHANGES_FOUND if conversion.changes else 0)
    _write(conversion, output)


def _bytes(script: Path) -> bytes:
    if script.is_dir():
        raise SpecError(
            f"{script}: is a folder: give the one file that holds the training loop"
        )
    try:
        return script.read_bytes()
    except OSError as exc:
        raise SpecError(f"{script}: can not be read: {exc.strerror}") from exc


def _check_output(output: Path, *, force: bool) -> None:
    if output.is_dir():
        raise SpecError(f"{output}: is a folder: name the file to write")
    if output.exists() and not force:
        raise SpecError(
            f"{output}: exists already: give another name, or --force to overwrite it"
        )
    if not output.absolute().parent.is_dir():
        raise SpecError(f"{output}: the folder {output.parent} does not exist")


def _write(conversion: Conversion, output: Path | None) -> None:
    if output is not None:
        # As it was read: no end of line is translated.
        output.write_bytes(conversion.after.encode("utf-8"))
        click.echo(f"written to {output}")
    elif conversion.changes:
        click.echo("nothing written: name a file with -o")
