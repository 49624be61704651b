"""``stretto report``: the HTML page for what was measured and predicted."""

from __future__ import annotations

import click

from stretto.report import gather, page


@click.command(name="report")
@click.argument("files", nargs=-1, required=True, metavar="FILES...", type=click.Path())
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(),
    help="the page to write",
)
@click.option("--title", help="title of the page; else that of the results")
def command(files: tuple[str, ...], output: str, title: str | None) -> None:
    """Makes one self-contained page of FILES.

    FILES may be results, workload, cluster, plan and timeline files and traces; each
    says itself what it is. `stretto report demo-out/*.json` shows a demo again.
    """
    page.save(output, gather.gather(files, title=title))
    click.echo(output)
