"""``stretto convert``: turn training code for one device into distributed code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stretto.cli._outputs import OutputCommand
from stretto.convert import Choices, Conversion, Evaluation, Target, convert_bytes
from stretto.errors import SpecError

CHANGES_FOUND = 3
"""Exit code of --check if something would change."""


@click.command(cls=OutputCommand)
@click.argument("script", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the converted script to this file.  [default: write nothing]",
)
@click.option("--force", is_flag=True, help="Overwrite an existing output file.")
@click.option(
    "--to",
    "target",
    type=click.Choice([t.value for t in Target]),
    default=Target.STRETTO.value,
    show_default=True,
    help="What the converted script trains with.",
)
@click.option(
    "--evaluate",
    type=click.Choice([e.value for e in Evaluation]),
    default=Evaluation.ALL.value,
    show_default=True,
    help=(
        "Which ranks evaluate: all ranks share the batches, or rank 0 takes all of "
        "them."
    ),
)
@click.option(
    "--per-rank",
    is_flag=True,
    help="Treat batch sizes as each rank's, instead of all ranks' together.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Write nothing; exit with 3 if something would change.",
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

    Shows the changes as a unified diff, and lists, with the lines of SCRIPT, what was
    changed, what you must decide, and notes. Code that is not understood is refused.
    Converting a converted script changes nothing.
    """
    choices = Choices(
        target=Target(target),
        evaluation=Evaluation(evaluate),
        per_rank_batch=per_rank,
    )
    if output is not None and check:
        raise click.UsageError("--check writes nothing: omit -o")
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
            f"{script}: is a folder: give the one file that contains the training loop"
        )
    try:
        return script.read_bytes()
    except OSError as exc:
        raise SpecError(f"{script}: cannot be read: {exc.strerror}") from exc


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
        # As it was read: line endings are not translated.
        output.write_bytes(conversion.after.encode("utf-8"))
        click.echo(f"written to {output}")
    elif conversion.changes:
        click.echo("nothing written: name a file with -o")
