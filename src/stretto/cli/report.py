"""``stretto report``: draw measurements and predictions on an HTML page."""

from __future__ import annotations

import click

from stretto.cli._outputs import OutputCommand, writable
from stretto.report import gather, page


@click.command(cls=OutputCommand, name="report")
@click.argument("files", nargs=-1, required=True, metavar="FILES...", type=click.Path())
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(),
    callback=writable,
    help="The page to write.",
)
@click.option("--title", help="Title of the page.  [default: the results' title]")
def command(files: tuple[str, ...], output: str, title: str | None) -> None:
    """Make one self-contained page of FILES.

    FILES may be results, workload, cluster, plan, tuning and timeline files, and
    traces; each file names its kind. `stretto report demo-out/*.json` draws a demo's
    page again.
    """
    page.save(output, gather.gather(files, title=title))
    click.echo(output)
